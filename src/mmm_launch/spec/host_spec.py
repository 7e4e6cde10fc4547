"""Plans the ranks of one host, on that host: whether they are forked, and with which environment."""

import os
import platform
import socket
import sys
from dataclasses import dataclass, replace
from typing import Any

from mmm_launch.contract import unreachable
from mmm_launch.cores import usable_cores
from mmm_launch.errors import LaunchError
from mmm_launch.program.target import Target
from mmm_launch.spec import accelerators, binding, stage

THREADS = "OMP_NUM_THREADS"
FORKABLE = "one process imports, then forks the ranks"


@dataclass(frozen=True)
class HostSpec:
    """What a fork server and its ranks get.

    Attributes:
        target: what each rank runs.
        shared: environment variables of every rank, and of the fork server.
        ranks: for each rank, the variables in which it differs.
        fork: whether one process imports for all ranks, and forks them.
        start: why ranks are forked, or why not.
        python: path of the Python that runs the ranks.
    """

    target: Target
    shared: dict[str, str]
    ranks: list[dict[str, str]]
    fork: bool
    start: str
    python: str = sys.executable


def make(target: Target, command: dict[str, Any], build: str | None = None) -> HostSpec:
    """Make the spec of this host from what launch has told it.

    Args:
        target: what each rank runs.
        command: what `LaunchSpec.host_command` returned.
        build: what the installed torch was built for. Default: read from torch's files.

    Raises:
        LaunchError: this host cannot bind its ranks so, or nobody could reach rank 0 on it.
    """
    shared = dict(command["shared"])
    count = command["count"]
    # Rank 0 is on this host. The other ranks would wait for minutes before they say that they cannot reach it.
    if command["first"] == 0 and shared["WORLD_SIZE"] != "1":
        check_master(shared["MASTER_ADDR"], int(shared["MASTER_PORT"]))
    cpus: list[str | None] = [None] * count
    if command["bind"]:
        cpus = binding.split(command["bind"], count)
    # Ranks that are not bound share the cores of the host evenly.
    cores = max(1, usable_cores() // count)
    ranks: list[dict[str, str]] = []
    threads: list[int] = []
    for local_rank, own_cpus in enumerate(cpus):
        rank = {"RANK": str(command["first"] + local_rank), "LOCAL_RANK": str(local_rank)}
        if own_cpus is None:
            threads.append(cores)
        else:
            rank[binding.CPUS_VARIABLE] = own_cpus
            threads.append(len(binding.cpu_list(own_cpus)))
        if local_rank < len(command["device_order"]):
            rank[command["device_variable"]] = str(command["device_order"][local_rank])
        ranks.append(rank)
    if THREADS not in shared:
        # Libraries read it when they are loaded, which is in the fork server before the fork. So it is shared as well.
        shared[THREADS] = str(max(threads))
        for rank, rank_threads in zip(ranks, threads, strict=True):
            rank[THREADS] = str(rank_threads)
    fork, why = start_method(target, command["prefork"], command["device"], build)
    spec = HostSpec(target, shared, ranks, fork, why)
    if "stage" in command:
        return from_copy(spec, **command["stage"])
    return spec


def check_master(address: str, port: int) -> None:
    """Raises `LaunchError` if rank 0, on this host, cannot listen where the other ranks will look for it."""
    # The address may belong to another host, or the port be taken.
    problem = unreachable(address, port)
    if problem:
        raise LaunchError(
            f"rank 0 on {socket.gethostname()} cannot be reached at {address}:{port}: {problem}.\n"
            "  Set MASTER_ADDR to a name or address of that host that all hosts know, and MASTER_PORT to a free port; "
            "or unset them. 127.0.0.1 needs a loopback interface that is up (as root: ip link set lo up)."
        )


def from_copy(plan: HostSpec, source: str, copy: str) -> HostSpec:
    """Change the plan so that ranks run from `copy`, this host's copy of the environment `source`."""
    python = stage.interpreter(source, copy) or plan.python
    target = plan.target
    if not target.is_python:
        program = stage.mapped(target.command[0], source, copy)
        target = replace(target, command=(program, *target.command[1:]))
    changed = stage.environment({**os.environ, **plan.shared}, source, copy)
    return replace(plan, target=target, python=python, shared=plan.shared | changed)


def start_method(target: Target, prefork: bool, device: str | None, build: str | None = None) -> tuple[bool, str]:
    """Decide whether this host's ranks are forked from one process, and say why, or why not."""
    if build is None:
        build = accelerators.torch_build()
    if not target.is_python:
        return False, "spawn: the command is not `python3 -m MODULE`, `python3 SCRIPT` or `python3 -c CODE`"
    if not prefork:
        return False, "spawn: --no-prefork"
    if device == "xpu" or (build == "xpu" and device != "cpu"):
        return False, "spawn: an Intel GPU's driver does not survive a fork"
    if platform.system() != "Linux":
        return False, f"spawn: forking is not safe on {platform.system()} ({sys.platform})"
    return True, f"prefork: {FORKABLE}"
