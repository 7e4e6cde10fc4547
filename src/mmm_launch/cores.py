"""Counts the CPU cores that this process may use: the least of its affinity and of its control groups' quotas."""

import os
from collections.abc import Iterator
from pathlib import Path

# Files with a group's quota and period: of control groups of version 2, and of version 1.
QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process is bound to, or as many as its control groups' quotas allow, if that is fewer.

    Args:
        root: root of the file system; a test makes up another.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in _groups(root):
        for files in QUOTAS:
            cores = min(cores, _quota(group, files, cores))
    return max(1, cores)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of all groups above them: each may have a quota."""
    tree = root / "sys/fs/cgroup"
    # Inside a container these folders are the container's own groups, whatever the kernel calls them.
    yield tree
    yield tree / "cpu"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # Version 2 has the line 0::/a/b. Version 1 has one for each tree, such as 4:cpu,cpuacct:/a/b, and not every
        # system calls the tree of cpu,cpuacct "cpu" as well.
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (tree / controllers, tree / "cpu"):
            group = mount / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _quota(group: Path, files: tuple[str, ...], otherwise: int) -> int:
    """Return the whole cores that a group's processes may use together; `otherwise` if it has no quota."""
    try:
        quota, period = " ".join((group / name).read_text() for name in files).split()
        cores = int(quota) // int(period)
    except (OSError, ValueError):
        # The group has no such file, or no quota: "max 100000".
        return otherwise
    # Version 1 says −1 where there is no quota.
    if cores < 0:
        return otherwise
    return cores
