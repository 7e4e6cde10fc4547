"""Tells how much memory is still free, on this host and on a device, and how much this process has used at its peak."""

from __future__ import annotations

import os
from pathlib import Path

import torch

ROOT = Path("/")


def host_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that processes of this host can still take, within the limits of this process's control groups.

    Free swap counts, and so does the part of the page cache that the kernel can give back.

    Args:
        root: root of the file system that has ``proc`` and ``sys``.

    Returns:
        None where the system does not tell.
    """
    meminfo = _table(root / "proc/meminfo")
    if "MemAvailable:" not in meminfo:
        return _physical() if root == ROOT else None
    # /proc/meminfo counts in kB of 1,024 bytes.
    swap = 1024 * meminfo.get("SwapFree:", 0)
    available = 1024 * meminfo["MemAvailable:"]
    for allowed in _groups(root):
        available = min(available, allowed)
    return available + swap


def _physical() -> int | None:
    """All memory of a host that does not tell how much of it is free."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _groups(root: Path) -> list[int]:
    """The bytes that each control group around this process still allows."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    allowed = []
    top = root / "sys/fs/cgroup"
    # Lines with another start are of control groups of version 1.
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        for group in (top / path, *(top / path).parents):
            limit = _number(group / "memory.max")
            used = _number(group / "memory.current")
            if limit is not None and used is not None:
                # The page cache of files counts as used, but the kernel gives it back when memory is short.
                stat = _table(group / "memory.stat")
                cached = stat.get("active_file", 0) + stat.get("inactive_file", 0)
                allowed.append(limit - used + cached)
            if group == top:
                break
    return allowed


def _table(path: Path) -> dict[str, int]:
    """Read a file that has a name and a number in each line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    values = {}
    for line in lines:
        fields = line.split()
        if len(fields) > 1 and fields[1].isdigit():
            values[fields[0]] = int(fields[1])
    return values


def _number(path: Path) -> int | None:
    """Read the number in a file; None if there is no file, or if it says ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory that are still free; None if it does not tell, or is the host."""
    try:
        free, _ = getattr(torch, device.type).mem_get_info(device)
        return int(free)
    except (AttributeError, RuntimeError, NotImplementedError, AssertionError):
        return None


def start_of_peak(device: torch.device) -> int:
    """Begin to measure the peak that `peak_memory` returns.

    Returns:
        Bytes of host memory that the process has by now, which do not count for the peak. On an accelerator this is 0,
        because there all tensors count.
    """
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).reset_peak_memory_stats(device)
        return 0
    return 1024 * _table(ROOT / "proc/self/status").get("VmRSS:", 0)


def peak_memory(device: torch.device, before: int) -> tuple[int | None, str]:
    """Return the most bytes that this process has had at one time, and a text that says which bytes are counted.

    Args:
        device: device that the process computes on.
        before: what `start_of_peak` has returned.

    Returns:
        On an accelerator the bytes of tensors. A CPU keeps no count of tensors: there it is by how much the process has
        grown. None where the system does not tell.
    """
    if device.type in ("cuda", "xpu"):
        allocated = getattr(torch, device.type).max_memory_allocated(device)
        return int(allocated), "tensors, by the allocator"
    # The most resident memory that the process has ever had ("high-water mark").
    peak = 1024 * _table(ROOT / "proc/self/status").get("VmHWM:", 0)
    if device.type != "cpu" or not peak or not before:
        return None, "nothing here tells"
    return max(peak - before, 0), "that the process grew by, libraries included"
