"""The plan for ranks on this host alone: how many, with which environment, and why."""

import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mmm.contract import DEVICE_VARIABLE, RANK_VARIABLES, check_loopback, numbering, read_number
from mmm.errors import LaunchError
from mmm.launch.job import accelerators, hosts, staging, variables
from mmm.launch.job.target import Target

DEFAULT_CPU_RANKS = 4
FORKABLE = "one process imports, then forks the ranks"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything `supervise` needs to start this host's ranks, and why each value is what it is."""

    target: Target
    shared: dict[str, str]  # variables that every rank gets
    ranks: list[dict[str, str]]  # variables of each rank on this host
    device: str | None  # torch's device type, where one was chosen or found
    fork: bool
    why: dict[str, str]  # variable, "ranks" or "start" → where the value came from
    notes: tuple[str, ...] = ()  # said before the start
    python: str = sys.executable  # by which Python ranks run


def plan(
    target: Target,
    *,
    nproc: int | None,
    device: str | None,
    prefork: bool = True,
    environ: Mapping[str, str] = os.environ,
    found: accelerators.Accelerators | None = None,
    build: str | None = None,
) -> LaunchPlan:
    """Plan `nproc` ranks of `target` on this host. `found` and `build` stand in for what the host has.

    Raises `LaunchError` where the environment does not allow it: already a rank, or a MASTER_PORT that is no free port.
    """
    refuse_inside_a_rank(environ)
    build = accelerators.torch_build() if build is None else build
    found = found or accelerators.find(build=build, environ=environ)
    why: dict[str, str] = {}
    notes: list[str] = []
    found_why = f"found {found.why}" if found.device else ""
    device, why[DEVICE_VARIABLE] = variables.given_device(device, environ) or (found.device, found_why)
    if nproc is not None:
        count, why["ranks"] = nproc, "-n"
    elif device == "cpu" or (device is None and not found.device):
        count, why["ranks"] = DEFAULT_CPU_RANKS, "-n not given, no accelerator to count"
        reason = "CPU was chosen" if device == "cpu" else f"no accelerator found ({found.why})"
        notes.append(f"{reason}: {count} CPU ranks (choose with -n)")
        device = "cpu"
        why[DEVICE_VARIABLE] = why[DEVICE_VARIABLE] or "no accelerator found"
    elif device == found.device:
        count, why["ranks"] = found.count, f"one per accelerator: {found.why}"
    elif device == "mps":
        count, why["ranks"] = 1, "mps is one device"
    else:
        count, why["ranks"] = 1, f"-n not given, no {device} device found ({found.why})"
        notes.append(f"no {device} device found ({found.why}): 1 rank (choose with -n)")

    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    check_loopback()
    shared["MASTER_ADDR"], why["MASTER_ADDR"] = "127.0.0.1", "all ranks are on this host"
    shared["MASTER_PORT"], why["MASTER_PORT"] = _port(environ)
    if environ.get("OMP_NUM_THREADS"):
        shared["OMP_NUM_THREADS"], why["OMP_NUM_THREADS"] = environ["OMP_NUM_THREADS"], "set in the environment"
    else:
        cores = available_cores()
        shared["OMP_NUM_THREADS"] = str(max(1, cores // count))
        why["OMP_NUM_THREADS"] = f"{cores} cores, {count} ranks"
    if device:
        shared[DEVICE_VARIABLE] = device
    shared |= variables.torch_variables(build, environ)
    why["PYTORCH_NVML_BASED_CUDA_CHECK"] = "asking for devices must not open one before the fork"
    fork, why["start"] = start_method(target, prefork, device, build)
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return LaunchPlan(target, shared, ranks, device, fork, why, tuple(notes))


def from_copy(plan: LaunchPlan, source: str, copy: str) -> LaunchPlan:
    """The plan with ranks that run from `copy`, a copy of the environment `source`."""
    target, python = plan.target, staging.interpreter(source, copy) or plan.python
    if not target.is_python:
        first = python if target.command[0] == sys.executable else staging.mapped(target.command[0], source, copy)
        target = replace(target, command=(first, *target.command[1:]))
    changed = staging.environment({**os.environ, **plan.shared}, source, copy)
    return replace(plan, target=target, python=python, shared=plan.shared | changed)


def refuse_inside_a_rank(environ: Mapping[str, str]) -> None:
    """Raise `LaunchError` where some launcher has started this process as one of its ranks."""
    own = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if own:
        given = ", ".join(f"{name}={environ[name]}" for name in own)
        raise LaunchError(
            f"already a rank ({given} in the environment): each rank would start ranks of its own.\n"
            f"  Start CMD itself here, or outside of another launcher: unset {' '.join(own)}"
        )
    source = numbering(environ)
    if source is None:
        return
    rank, size = read_number(environ, RANK_VARIABLES[source].rank), read_number(environ, RANK_VARIABLES[source].world)
    assert rank is not None
    if source == "pals" and size is None:  # Aurora's
        size = "PMI_SIZE", 2
    if size is not None and size[1] > 1:
        given = f"{rank[0]}={rank[1]}, {size[0]}={environ.get(size[0], 'more than 1')}"
        raise LaunchError(
            f"already a rank ({given} in the environment): each rank would start ranks of its own.\n"
            "  Start one launch, not one a rank."
        )


def available_cores() -> int:
    """Cores this process may use: its affinity, less where a control group's quota gives less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period))) if quota != "max" else cores
    except (OSError, ValueError):
        return cores


def describe(plan: LaunchPlan, preloads: list[str]) -> str:
    """The plan in words, for --dry-run."""
    why = plan.why
    lines = [
        f"ranks    {len(plan.ranks)} on {socket.gethostname()} ({why['ranks']})",
        f"command  {shlex.join(plan.target.line())}",
        f"start    {why['start']}",
    ]
    if plan.fork and preloads:
        lines.append(f"preload  {', '.join(preloads)}")
    lines.append("every rank:")
    for name, value in plan.shared.items():
        note = why.get(name)
        lines.append(f"  {name}={'…' if note == '--env' else value}" + (f"   ({note})" if note else ""))
    for rank in plan.ranks:
        lines.append(f"rank {rank['RANK']}:")
        lines += [f"  {name}={value}" for name, value in rank.items()]
    return "\n".join(lines)


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


def _port(environ: Mapping[str, str]) -> tuple[str, str]:
    given = variables.given_port(environ)
    if not given:
        return str(hosts.free_port()), "a free port"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(given)))
        except OSError as error:
            raise LaunchError(
                f"MASTER_PORT={given} in the environment cannot be used: {error.strerror}.\n"
                "  unset MASTER_PORT and a free one is picked, or set another."
            ) from None
    return given, "set in the environment"
