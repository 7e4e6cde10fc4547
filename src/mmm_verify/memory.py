"""How much memory this host still has."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that processes of this host can still take, within the limits of their control groups (version 2).

    Returns:
        None where the system does not tell.
    """
    try:
        lines = [line.split() for line in MEMINFO.read_text().splitlines()]
    except OSError:
        return None
    kibibytes = {line[0]: int(line[1]) for line in lines}
    if "MemAvailable:" not in kibibytes:
        return None
    swap = 1024 * kibibytes.get("SwapFree:", 0)
    limits = [1024 * kibibytes["MemAvailable:"], *_room_of_groups()]
    return min(limits) + swap


def _room_of_groups() -> list[int]:
    """What each control group over this process still allows, in bytes. Pages of files that it keeps can be freed."""
    rooms = []
    try:
        own = CGROUP.read_text().strip().rpartition("::")[2]
        group = CGROUPS / own.lstrip("/")
        while group != CGROUPS:
            limit = (group / "memory.max").read_text().strip()
            if limit.isdigit():
                used = int((group / "memory.current").read_text())
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                files = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
                rooms.append(int(limit) - used + files)
            group = group.parent
    except OSError:  # another version of control groups, or none
        return rooms
    return rooms
