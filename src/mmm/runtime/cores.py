"""How many CPU cores this process may use. `mmm_launch/cores.py` is the same: neither house imports the other."""

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores of this process's affinity; fewer where a quota of one of its control groups allows fewer.

    Args:
        root: stands for the host's own, in a test.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in _groups(root):
        cores = min(cores, _quota(group, cores))
    return max(1, cores)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of all groups that these are in: each may have a quota."""
    mounted = root / "sys/fs/cgroup"
    yield mounted  # in a container this is its own group, whatever the kernel calls it
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        # Version 2 has one tree, and no controllers here. In version 1 each controller has a tree of its own.
        if not controllers:
            trees = [mounted]
        elif "cpu" in controllers.split(","):
            trees = [mounted / "cpu", mounted / controllers]
        else:
            continue
        for tree in trees:
            group = tree / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(tree):
                    yield folder


def _quota(group: Path, otherwise: int) -> int:
    """The whole cores that a group's processes may use together."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        cores = int(quota) // int(period)
    except (OSError, ValueError):
        return otherwise  # no such file, or "max"
    if int(quota) < 0:  # version 1 has no quota
        return otherwise
    return cores
