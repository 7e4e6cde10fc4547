"""Counts the CPU cores that this process may use.

`mmm/runtime/cores.py` has the same code: neither package imports the other.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process is bound to, or as many as its control groups' quotas allow, if that is fewer.

    Args:
        root: root of the file system; a test makes up another.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in _groups(root):
        cores = min(cores, _quota(group, cores))
    return max(1, cores)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups above it: each may have a quota."""
    tree = root / "sys/fs/cgroup"
    # Inside a container this folder is the container's own group, whatever the kernel calls it.
    yield tree
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # Lines of version 1 of control groups begin with another number; those are not read.
        if line.startswith("0::/"):
            group = tree / line.removeprefix("0::/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def _quota(group: Path, otherwise: int) -> int:
    """Return the whole cores that a group's processes may use together; `otherwise` if it has no quota."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):
        # The group has no such file, or no quota: "max 100000".
        return otherwise
