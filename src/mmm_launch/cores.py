"""Counts the CPU cores that this process may use: the least of its affinity and of its control groups' quotas."""

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process is bound to, or as many as its control groups' quotas allow, if that is fewer.

    Args:
        root: root of the file system; a test makes up another.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in control_groups(root):
        file = group / "cpu.max"
        # Microseconds that the group's processes may compute, of each period: "150000 100000", or "max 100000".
        quota, _, period = (file.read_text() if file.exists() else "max").partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control group and of all groups above it, of version 2: each has limits.

    Empty where the system has none, as macOS.
    """
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    # Lines with another start are of control groups of version 1.
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        groups += [folder for folder in (top / path, *(top / path).parents) if folder.is_relative_to(top)]
    return groups
