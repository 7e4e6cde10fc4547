"""Counts the CPU cores that this process may use.

`mmm_launch/cores.py` is a copy, because neither package imports the other.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Count the CPU cores that this process may use, by its affinity and the quotas of its control groups.

    Args:
        root: root of the file system; a test puts a folder in its place.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in _groups(root):
        cores = min(cores, _quota(group, cores))
    return max(1, cores)


def _groups(root: Path) -> Iterator[Path]:
    """List the folders of this process's control group and of all groups around it: each may have a quota."""
    tree = root / "sys/fs/cgroup"
    # In a container this folder is its own group, whatever the kernel calls it.
    yield tree
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # Lines with another start are of control groups of version 1.
        if line.startswith("0::/"):
            group = tree / line.removeprefix("0::/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def _quota(group: Path, otherwise: int) -> int:
    """Return the whole cores that a group's processes may use together; `otherwise` if there is no quota."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):
        # There is no such file, or its quota is "max".
        return otherwise
