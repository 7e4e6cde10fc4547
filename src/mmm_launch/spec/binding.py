"""Decides on which CPUs of this host each of its ranks runs (--cpu-bind)."""

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
    """Read a list of CPUs: `0-3,8` → 0, 1, 2, 3, 8. Raises `ValueError`."""
    cpus: list[int] = []
    for entry in text.split(","):
        low, _, high = entry.partition("-")
        cpus += range(int(low), int(high or low) + 1)
    return cpus


def check(bind: str) -> None:
    """Raises `LaunchError` unless launch can bind ranks by `bind` itself."""
    if not HOW.fullmatch(bind):
        raise LaunchError(f"--cpu-bind {bind}: launch binds ranks itself, and knows {OURS}.")


def split(bind: str, ranks: int, allowed: Sequence[int] | None = None, system: Path = SYSTEM) -> list[str | None]:
    """Return the CPUs that each rank of this host is bound to, as text such as "4-7,36". None: it is not bound.

    Args:
        bind: "none"; "cores": the same number of neighbouring whole cores for each rank, with all their hardware
            threads; or "list:…": CPUs for each rank, as the user has typed them.
        ranks: number of ranks on this host.
        allowed: CPUs that may be used. Default: those of this process.
        system: folder in which the kernel lists the CPUs.

    Raises:
        LaunchError: there are fewer cores, or fewer lists of CPUs, than ranks; or this process may not use the CPUs.
    """
    check(bind)
    if bind == "none":
        return [None] * ranks
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError(f"--cpu-bind {bind}: this system cannot bind a process to CPUs. Leave it out.")
    if allowed is None:
        # A job's control group or a launcher may have bound this process already: only these CPUs can be used.
        allowed = sorted(os.sched_getaffinity(0))
    if bind == "cores":
        cores = _cores(allowed, system)
        cores_per_rank = len(cores) // ranks
        if not cores_per_rank:
            raise LaunchError(f"--cpu-bind cores: ranks on this host: {ranks}, cores: {len(cores)}.")
        cpus_of_ranks: list[str | None] = []
        for start in range(0, cores_per_rank * ranks, cores_per_rank):
            own_cores = cores[start : start + cores_per_rank]
            cpus_of_ranks.append(",".join(str(cpu) for core in own_cores for cpu in core))
        return cpus_of_ranks
    cpu_lists = bind.split(":")[1:]
    if len(cpu_lists) < ranks:
        raise LaunchError(f"--cpu-bind {bind}: lists of CPUs: {len(cpu_lists)}, ranks on this host: {ranks}.")
    for cpu_text in cpu_lists[:ranks]:
        cpus = cpu_list(cpu_text)
        if not cpus or not set(cpus) <= set(allowed):
            raise LaunchError(f"--cpu-bind {bind}: this process may not use all CPUs {cpu_text}.")
    return list(cpu_lists[:ranks])


def _cores(allowed: Sequence[int], system: Path) -> list[list[int]]:
    """Group the allowed CPUs by core. Cores are in the order of their package (socket) and first CPU."""
    # Hardware threads of one core have numbers far apart: on many hosts CPU 0 and CPU 64 are the same core.
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in allowed:
        topology = system / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            first = int(re.split("[,-]", (topology / "thread_siblings_list").read_text())[0])
        except (OSError, ValueError):
            # The kernel does not say, as in some containers: take each CPU for a core.
            package = 0
            first = cpu
        cores.setdefault((package, first), []).append(cpu)
    return [cores[key] for key in sorted(cores)]
