"""What mpiexec or srun starts on the hosts of a run, once a rank or once a host: `python -m mmm.launch.host.agent …`.

It connects to launch, waits until everyone is there, and then supervises its rank (or its host's ranks) as launch does
on one host, except that failures go to launch, and commands come from there. It imports no torch. If launch is gone it
ends its ranks; if launch knows how they ended, its own exit code is 0, so that no MPI adds its own words.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from mmm.contract import LOOPBACK, RANK_VARIABLES, check_loopback, read_number
from mmm.errors import LaunchError, UserError
from mmm.launch.control import commands, handshake
from mmm.launch.control import link as links
from mmm.launch.control.failures import Failure, say
from mmm.launch.control.link import Link, Lost
from mmm.launch.control.server import ForkServerProcess
from mmm.launch.control.wire import CPUS_VARIABLE
from mmm.launch.host.entry import Entry, OneAttempt, host_name
from mmm.launch.host.memory import host_memory
from mmm.launch.host.stage import Stager
from mmm.launch.job import binding, hosts, local
from mmm.launch.job import target as targets
from mmm.launch.job.local import LaunchPlan
from mmm.launch.job.mpi import AGENT_VARIABLE
from mmm.launch.job.target import Target

MPI_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PALS_", "MPI_LOCAL", "HYDI_")
NAMES = {"srun": "slurm", "hydra": "mpich", "pals": "pals", "openmpi": "openmpi"}  # in `RANK_VARIABLES`


def main() -> int:
    words = sys.argv[1:]
    if AGENT_VARIABLE not in os.environ:
        say(
            f"launch: error: {AGENT_VARIABLE} is not in the environment of what the launcher has started: it has to "
            "pass its environment on to all hosts"
        )
        return 2
    entry = json.loads(os.environ.pop(AGENT_VARIABLE))
    target = read_target(words)
    inherit = inheritable()
    hello: dict[str, Any] = {"host": host_name(), "cores": local.available_cores(), "pid": os.getpid()}
    if hasattr(os, "sched_getaffinity"):
        hello["cpus"] = binding.as_text(sorted(os.sched_getaffinity(0)))
    hello["port"] = hosts.free_port("", entry["port"])
    if "index" in entry:  # the only one on its host
        hello["index"] = entry["index"]
        with host_memory():
            return run_attempts(entry, target, hello)
    try:
        place = numbers(entry["launcher"], os.environ, entry["processes"])
        hello |= {"rank": place[0], "world": place[1], "local_rank": place[2]}
    except UserError as error:
        hello |= {"error": f"{error} (on {hello['host']})"}
    stager: Stager | None = None
    command: links.Message = {}
    try:
        link = handshake.reach(entry["at"], entry["token"], links.CONNECT_TIMEOUT)
        link.send({"hello": hello})
        command = link.one(None)
        while "stage" in command:
            stager = stager or Stager(link, entry["token"])
            if not stager.answer(command["stage"]):
                return 0
            command = link.one(None)
    except Lost as lost:
        say(f"launch: {hello['host']} cannot reach launch, or launch has ended: {lost}")
        return 0 if stager is not None else 1  # at a 1 an MPI kills other hosts, which still remove their copies
    finally:
        if stager is not None and "go" not in command:
            stager.farewell(None)
    if "go" not in command:
        return 0  # launch ends before anything has begun
    try:
        plan = make_plan(target, command["go"], hello["host"])
    except UserError as error:
        refuse(link, command["go"], error)
        if stager is not None:
            stager.farewell(link)
        return 0
    if command["go"]["by"] == "host":
        forget_mpi()
        inherit = ()
    return Entry(plan, link, entry["launcher"], inherit, stager).run()


def run_attempts(entry: dict[str, Any], target: Target, hello: dict[str, Any]) -> int:
    """Run what launch sends, attempt after attempt, all ranks from one fork server, until launch wants no more."""
    forget_mpi()
    server: ForkServerProcess | None = None
    try:
        link = handshake.reach(entry["at"], entry["token"], links.CONNECT_TIMEOUT)
        link.send({"hello": hello})
        while "quit" not in (message := link.one(None)):
            if "go" not in message:
                continue  # it was for ranks that have ended
            try:
                plan = make_plan(target, message["go"], hello["host"])
            except UserError as error:
                refuse(link, message["go"], error)
                continue
            attempt = OneAttempt(plan, link, entry["launcher"], server=server)
            attempt.run()
            server = attempt.server
            if attempt.lost:
                return 1
        return 0
    except Lost as lost:
        if server is None:
            say(f"launch: {hello['host']} cannot reach launch, or launch has ended: {lost}")
        return 1
    finally:
        if server is not None:
            server.close()


def refuse(link: Link, go: dict[str, Any], error: UserError) -> None:
    """Tell launch why this host starts no ranks. Raises `Lost`."""
    failure = Failure.of_user(int(go["ranks"][0]["RANK"]), str(error))
    link.send({"failure": commands.write_failure(failure, time.monotonic())})
    link.send({"bye": True, "port": hosts.free_port("")})


def forget_mpi() -> None:
    """Take an MPI's variables out: one in a rank would take itself for all of the host."""
    for name in [name for name in os.environ if name.startswith(MPI_PREFIXES)]:
        del os.environ[name]


def numbers(launcher: str, env: Mapping[str, str], world: int) -> tuple[int, int, int | None]:
    """Rank, world size and local rank (None: not said) that `launcher`, and no other, has given this process.

    Args:
        launcher: ``srun``, ``hydra``, ``pals`` or ``openmpi``.
        world: what it was asked for; PALS does not always say.

    Raises:
        LaunchError: it has set no rank.
    """
    names = RANK_VARIABLES[NAMES[launcher]]
    rank = read_number(env, names.rank)
    if rank is None:
        raise LaunchError(
            f"{launcher} has given its process no rank: {' and '.join(names.rank)} is not set. If it is another kind "
            f"of MPI, say so: --mpi hydra|pals|openmpi"
        )
    total = read_number(env, names.world)
    local_rank = read_number(env, names.local_rank)
    return rank[1], world if total is None else total[1], None if local_rank is None else local_rank[1]


def make_plan(target: Target, go: dict[str, Any], host: str) -> LaunchPlan:
    """This process's ranks. Raises `LaunchError`: the master address or the binding is not possible on this host."""
    shared, places = dict(go["shared"]), [dict(place) for place in go["ranks"]]
    if any(place["RANK"] == "0" for place in places) and shared["WORLD_SIZE"] != "1":
        check_master_address(shared["MASTER_ADDR"], int(shared["MASTER_PORT"]), host)
    per_host = int(shared["LOCAL_WORLD_SIZE"])
    cpus = binding.split(go["bind"], per_host) if go["bind"] else [None] * per_host
    order = go.get("device_order", [])
    threads = []
    for place in places:
        local_rank = int(place["LOCAL_RANK"])
        own_cpus = cpus[local_rank]
        if own_cpus is not None:
            place[CPUS_VARIABLE] = own_cpus
        unbound = go.get("cores") or max(1, local.available_cores() // len(places))
        threads.append(go["threads"] or (len(binding.cpu_list(own_cpus)) if own_cpus is not None else unbound))
        if local_rank < len(order):
            place[go["device_variable"]] = str(order[local_rank])
    if "OMP_NUM_THREADS" not in shared:
        binding.set_threads(shared, places, threads)
    if go["by"] == "host":
        fork, why = local.start_method(target, go["prefork"], go["device"])
    else:
        fork, why = False, "one process a rank: there is nothing to share an import with"
    plan = LaunchPlan(target, shared, places, go["device"], fork, {"start": why})
    return local.from_copy(plan, **go["stage"]) if "stage" in go else plan


def check_master_address(address: str, port: int, host: str) -> None:
    """Rank 0's host: can it listen where the others will look for it?"""
    if address in LOOPBACK:
        check_loopback(address)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except socket.gaierror:
            raise LaunchError(
                f"MASTER_ADDR {address} cannot be resolved on {host}, where rank 0 is: set MASTER_ADDR "
                "to that host's name or address as all hosts know it."
            ) from None
        except OSError as error:
            raise LaunchError(
                f"rank 0 on {host} cannot listen on {address}:{port}: {error.strerror}.\n  Set "
                "MASTER_ADDR to that host's name or address as all hosts know it, and MASTER_PORT to a "
                "free port."
            ) from None


def read_target(words: list[str]) -> Target:
    if words[:1] == ["--exec"]:
        return Target("program", words[1], command=tuple(words[1:]))
    target = targets.from_tail(words)
    if target is None:
        raise SystemExit("usage: python -m mmm.launch.host.agent (-m MODULE | -c CODE | SCRIPT | --exec PROGRAM) ARGS…")
    return target


def inheritable() -> tuple[int, ...]:
    """File descriptors that were given to this process on purpose: an MPI's connection to its helper (PMI_FD)."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) > 2 and os.get_inheritable(int(name)):
                    found.append(int(name))
    return tuple(found)


def run() -> NoReturn:
    code = main()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
