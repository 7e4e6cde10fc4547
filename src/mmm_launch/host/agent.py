"""What mpiexec or srun starts on the hosts of a run, once a rank or once a host: `python -m mmm_launch.host.agent …`.

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

from mmm_launch.channel import commands, handshake
from mmm_launch.channel import link as links
from mmm_launch.channel.failures import Failure, say
from mmm_launch.channel.link import Link, Lost
from mmm_launch.contract import BACKENDS, LOOPBACK, check_loopback, read_number
from mmm_launch.errors import LaunchError, UserError
from mmm_launch.host import stage as stages
from mmm_launch.host.agent_supervisor import AgentSupervisor, end_helper, host_name
from mmm_launch.host.stage import Copy
from mmm_launch.program import target as targets
from mmm_launch.program.target import Target
from mmm_launch.run.local import LocalRanks
from mmm_launch.spec import binding, host_spec, hosts
from mmm_launch.spec.host_spec import HostSpec
from mmm_launch.spec.mpi import AGENT_VARIABLE
from mmm_launch.spec.stage import Stage

MPI_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PALS_", "MPI_LOCAL", "HYDI_")


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
    hello: dict[str, Any] = {"host": host_name(), "cores": host_spec.available_cores(), "pid": os.getpid()}
    if hasattr(os, "sched_getaffinity"):
        hello["cpus"] = binding.as_text(sorted(os.sched_getaffinity(0)))
    hello["port"] = hosts.free_port("", entry["port"])
    try:
        place = numbers(entry["launcher"], os.environ, entry["processes"])
        hello |= {"rank": place[0], "world": place[1], "local_rank": place[2]}
    except UserError as error:
        hello |= {"error": f"{error} (on {hello['host']})"}
    return Agent(entry, target, hello, inherit).run()


class Agent:
    """Gets its host's copy of the environment, with --stage, and runs its ranks.

    Attributes:
        entry: where launch is, and what it says of this agent. hello: what this one tells launch.
        inherit: file descriptors for the ranks.
        copy: the environment that its ranks run from, with --stage.
    """

    def __init__(self, entry: dict[str, Any], target: Target, hello: dict[str, Any], inherit: tuple[int, ...]) -> None:
        self.entry, self.target, self.hello, self.inherit = entry, target, hello, inherit
        self.copy: Copy | None = None

    def run(self) -> int:
        """This process's exit code."""
        has_begun = is_lost = False
        try:
            self.unpack()
            link = handshake.reach(self.entry["at"], self.entry["token"], links.CONNECT_TIMEOUT)
            link.send({"hello": self.hello})
            while True:
                message = link.one(None)
                if "go" in message:
                    has_begun = True
                    return self.run_ranks(link, message["go"])
                return 0  # launch ends before anything has begun
        except SystemExit:
            return 0  # told to end while it unpacked; at another code an MPI kills other hosts' agents, which clean up
        except Lost as lost:
            is_lost = True
            if not has_begun:
                say(f"launch: {self.hello['host']} cannot reach launch, or launch has ended: {lost}")
            return 1 if self.copy is None else 0  # at a 1 an MPI kills others, which may still remove their copies
        finally:
            if self.copy is not None and not has_begun:
                self.copy.remove()
                if is_lost:
                    end_helper()

    def unpack(self) -> None:
        """Get this host's copy of the environment, with --stage. launch hears of it if that fails."""
        if "stage" not in self.entry:
            return
        try:
            self.copy = stages.unpack(Stage(**self.entry["stage"]))
        except LaunchError as error:
            self.hello["error"] = f"{error} (on {self.hello['host']})"

    def run_ranks(self, link: Link, go: dict[str, Any]) -> int:
        """Run this host's ranks. Returns an exit code. Raises `Lost`."""
        if self.copy is not None:
            go["stage"] = {"source": self.entry["stage"]["source"], "copy": self.copy.path}
        try:
            plan = make_plan(self.target, go, self.hello["host"])
        except UserError as error:
            try:
                refuse(link, go, error)
            finally:
                if self.copy is not None:
                    self.copy.remove()
            return 0
        if go["by"] == "host":
            forget_mpi()
            self.inherit = ()
        ranks = LocalRanks(plan, self.hello["host"], self.inherit)
        return AgentSupervisor(ranks, link, self.entry["launcher"], self.copy).run()


def refuse(link: Link, go: dict[str, Any], error: UserError) -> None:
    """Tell launch why this host starts no ranks. Raises `Lost`."""
    failure = Failure.of_user(int(go["ranks"][0]["RANK"]), str(error))
    link.send({"failure": commands.write_failure(failure, time.monotonic())})
    link.send({"bye": True})


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
    names = BACKENDS[launcher]
    rank = read_number(env, names.rank)
    if rank is None:
        raise LaunchError(
            f"{launcher} has given its process no rank: {' and '.join(names.rank)} is not set. If it is another kind "
            f"of MPI, say so: --mpi hydra|pals|openmpi"
        )
    total = read_number(env, names.world)
    local_rank = read_number(env, names.local_rank)
    return rank[1], world if total is None else total[1], None if local_rank is None else local_rank[1]


def make_plan(target: Target, go: dict[str, Any], host: str) -> HostSpec:
    """This process's ranks. Raises `LaunchError`: the master address or the binding is not possible on this host."""
    shared = go["shared"]
    if any(rank["RANK"] == "0" for rank in go["ranks"]) and shared["WORLD_SIZE"] != "1":
        check_master_address(shared["MASTER_ADDR"], int(shared["MASTER_PORT"]), host)
    return host_spec.make(target, go)


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
        raise SystemExit("usage: python -m mmm_launch.host.agent (-m MODULE | -c CODE | SCRIPT | --exec PROGRAM) ARGS…")
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
