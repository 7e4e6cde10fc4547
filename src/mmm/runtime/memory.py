"""How much memory can still be had: of this host, within the limits of the process's control groups; of a device. And
how much of it this process has had at its peak."""

from __future__ import annotations

import os
from pathlib import Path

import torch

ROOT = Path("/")


def host_memory(root: Path = ROOT) -> int | None:
    """Bytes that processes of this host can still take, swap and what the page cache can give back included.

    Args:
        root: of the file system that has ``proc`` and ``sys``.

    Returns:
        None where the system does not tell.
    """
    lines = _table(root / "proc/meminfo")
    if "MemAvailable:" not in lines:
        return _physical() if root == ROOT else None
    swap = 1024 * lines.get("SwapFree:", 0)
    rooms = [1024 * lines["MemAvailable:"] + swap]
    return min(rooms + [room + swap for room in _groups(root)])


def _physical() -> int | None:
    """All memory of a host that does not tell what is free of it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _groups(root: Path) -> list[int]:
    """What each control group over this process still allows, in bytes."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    top = root / "sys/fs/cgroup"
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        for group in (top / path, *(top / path).parents):
            limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
            if limit is not None and used is not None:
                cached = sum(_table(group / "memory.stat").get(name, 0) for name in ("active_file", "inactive_file"))
                rooms.append(limit - used + cached)
            if group == top:
                break
    return rooms


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None for none, and for ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def device_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken of an accelerator's own memory; None where it does not tell, or is the host."""
    try:
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    except (AttributeError, RuntimeError, NotImplementedError, AssertionError):
        return None


def start_of_peak(device: torch.device) -> int:
    """Begin to count what `peak_memory` says.

    Returns:
        Bytes that the process has on its host by now, which do not count; of an accelerator 0: its tensors do.
    """
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).reset_peak_memory_stats(device)
        return 0
    return 1024 * _table(ROOT / "proc/self/status").get("VmRSS:", 0)


def peak_memory(device: torch.device, before: int) -> tuple[int | None, str]:
    """The most bytes that this process has had at once, and what they are.

    Args:
        before: of `start_of_peak`.

    Returns:
        None where nothing tells. On a CPU, which keeps no count of tensors, what the process has grown by.
    """
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).max_memory_allocated(device)), "tensors, by the allocator"
    peak = 1024 * _table(ROOT / "proc/self/status").get("VmHWM:", 0)
    if device.type != "cpu" or not peak or not before:
        return None, "nothing here tells"
    return max(peak - before, 0), "that the process grew by, libraries included"
