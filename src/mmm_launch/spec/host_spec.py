"""The ranks of one host: forked or not, with which environment."""

import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmm_launch.program.target import Target
from mmm_launch.spec import accelerators, binding, stage

FORKABLE = "one process imports, then forks the ranks"


@dataclass(frozen=True)
class HostSpec:
    """What a fork server and its ranks get.

    Attributes:
        shared: variables that every rank gets. ranks: further ones of each.
        fork: whether one process imports for all, and forks them. start: why, or why not.
        python: by which Python ranks run.
    """

    target: Target
    shared: dict[str, str]
    ranks: list[dict[str, str]]
    fork: bool
    start: str
    python: str = sys.executable


def make(target: Target, command: dict[str, Any], build: str | None = None) -> HostSpec:
    """As `LaunchSpec.host_command` says it. Raises `LaunchError`: the binding is not possible on this host.

    Args:
        build: stands in for that of the installed torch.
    """
    shared, count = dict(command["shared"]), command["count"]
    cpus: list[str | None] = [None] * count
    if command["bind"]:
        cpus = binding.split(command["bind"], count)
    ranks: list[dict[str, str]] = []
    threads: list[int] = []
    for local_rank, own_cpus in enumerate(cpus):
        rank = {"RANK": str(command["first"] + local_rank), "LOCAL_RANK": str(local_rank)}
        own_threads = max(1, available_cores() // count)
        if own_cpus is not None:
            rank[binding.CPUS_VARIABLE] = own_cpus
            own_threads = len(binding.cpu_list(own_cpus))
        if local_rank < len(command["device_order"]):
            rank[command["device_variable"]] = str(command["device_order"][local_rank])
        ranks.append(rank)
        threads.append(command["threads"] or own_threads)
    if "OMP_NUM_THREADS" not in shared:
        binding.set_threads(shared, ranks, threads)
    fork, why = start_method(target, command["prefork"], command["device"], build)
    spec = HostSpec(target, shared, ranks, fork, why)
    if "stage" in command:
        return from_copy(spec, **command["stage"])
    return spec


def from_copy(plan: HostSpec, source: str, copy: str) -> HostSpec:
    """The plan with ranks that run from `copy`, a copy of the environment `source`."""
    target, python = plan.target, stage.interpreter(source, copy) or plan.python
    if not target.is_python:
        first = python if target.command[0] == sys.executable else stage.mapped(target.command[0], source, copy)
        target = replace(target, command=(first, *target.command[1:]))
    changed = stage.environment({**os.environ, **plan.shared}, source, copy)
    return replace(plan, target=target, python=python, shared=plan.shared | changed)


def available_cores() -> int:
    """Cores this process may use: its affinity, less where a control group's quota gives less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period))) if quota != "max" else cores
    except (OSError, ValueError):
        return cores


def start_method(target: Target, prefork: bool, device: str | None, build: str | None = None) -> tuple[bool, str]:
    """Whether this host's ranks can be forked from one process, and why, or why not."""
    build = accelerators.torch_build() if build is None else build
    if not target.is_python:
        return False, "spawn: the command is not `python3 -m MODULE`, `python3 SCRIPT` or `python3 -c CODE`"
    if not prefork:
        return False, "spawn: --no-prefork"
    if device == "xpu" or (build == "xpu" and device != "cpu"):
        return False, "spawn: an Intel GPU's driver does not survive a fork"
    if platform.system() != "Linux":
        return False, f"spawn: forking is not safe on {platform.system()} ({sys.platform})"
    return True, f"prefork: {FORKABLE}"
