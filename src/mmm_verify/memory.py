"""How much memory this host still has."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that processes of this host can still take, within the limits of their control groups (version 2).

    Returns:
        None if the system does not tell.
    """
    try:
        text = MEMINFO.read_text()
    except OSError:
        return None
    # A line is "MemAvailable: 123 kB".
    rows = [line.split() for line in text.splitlines()]
    kibibytes = {row[0]: int(row[1]) for row in rows}
    if "MemAvailable:" not in kibibytes:
        return None
    swap = 1024 * kibibytes.get("SwapFree:", 0)
    limits = [1024 * kibibytes["MemAvailable:"], *_free_in_groups()]
    return min(limits) + swap


def _free_in_groups() -> list[int]:
    """Bytes that each control group of this process still allows, from its own group up to the root."""
    free = []
    try:
        # Version 2 has one line, "0::/path".
        path = CGROUP.read_text().strip().rpartition("::")[2]
        group = CGROUPS / path.lstrip("/")
        while group != CGROUPS:
            limit = (group / "memory.max").read_text().strip()
            # A group without a limit says "max".
            if limit.isdigit():
                used = int((group / "memory.current").read_text())
                statistics = (group / "memory.stat").read_text()
                counts = dict(line.split() for line in statistics.splitlines())
                # Cached pages of files count as used, but are freed when memory is needed.
                cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
                free.append(int(limit) - used + cached)
            group = group.parent
    # Another version of control groups, or none.
    except OSError:
        return free
    return free
