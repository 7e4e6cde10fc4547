"""Which CPUs of this host each of its ranks runs on, where launch binds them itself."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mmm_launch.errors import LaunchError

OURS = "none, cores, or list:0-3:4-7:… (CPUs of local rank 0, 1, …)"
HOW = re.compile(r"none|cores|list(:\d+(-\d+)?(,\d+(-\d+)?)*)+")
# The CPUs that a rank binds itself to, such as "4-7,36". It is taken out before the program runs.
CPUS_VARIABLE = "MMM_CPUS"
SYSTEM = Path("/sys/devices/system/cpu")


def cpu_list(text: str) -> list[int]:
    """`0-3,8` → 0, 1, 2, 3, 8. Raises `ValueError`."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def check(bind: str) -> None:
    """Raises `LaunchError` unless launch can bind ranks by `bind` itself."""
    if not HOW.fullmatch(bind):
        raise LaunchError(f"--cpu-bind {bind}: here launch binds the ranks itself, and knows {OURS}.")


def split(bind: str, ranks: int, allowed: Sequence[int] | None = None, system: Path = SYSTEM) -> list[str | None]:
    """For each of `ranks` ranks on this host the CPUs it is bound to, as text; None: not bound.

    `cores`: each rank gets as many whole cores as the next, side by side, with all threads of each.

    Raises:
        LaunchError: fewer cores, or fewer CPUs in the list, than ranks; or CPUs that this process may not use.
    """
    check(bind)
    if bind == "none":
        return [None] * ranks
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError(f"--cpu-bind {bind}: this system cannot bind a process to CPUs. Leave it out.")
    allowed = sorted(os.sched_getaffinity(0)) if allowed is None else allowed
    if bind == "cores":
        cores = _cores(allowed, system)
        each = len(cores) // ranks
        if not each:
            raise LaunchError(f"--cpu-bind cores: ranks on this host: {ranks}, cores: {len(cores)}.")
        starts = range(0, each * ranks, each)
        return [",".join(str(cpu) for core in cores[start : start + each] for cpu in core) for start in starts]
    parts = bind.split(":")[1:]
    if len(parts) < ranks:
        raise LaunchError(f"--cpu-bind {bind}: lists of CPUs: {len(parts)}, ranks on this host: {ranks}.")
    for part in parts[:ranks]:
        cpus = cpu_list(part)
        if not cpus or not set(cpus) <= set(allowed):
            raise LaunchError(f"--cpu-bind {bind}: this process may not use all CPUs {part}.")
    return list(parts[:ranks])


def _cores(allowed: Sequence[int], system: Path) -> list[list[int]]:
    """The allowed CPUs, by core; cores in the order of their package and first CPU."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in allowed:
        topology = system / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            first = int(re.split("[,-]", (topology / "thread_siblings_list").read_text())[0])
        except (OSError, ValueError):
            package, first = 0, cpu  # not said: each CPU is a core
        cores.setdefault((package, first), []).append(cpu)
    return [cores[key] for key in sorted(cores)]
