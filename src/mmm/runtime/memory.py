"""Tells how much memory a host has, what is free on a device, and how much this process has used at its peak."""

from __future__ import annotations

import os
from pathlib import Path

import torch

ROOT = Path("/")


def host_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that this host has, within the limits of this process's control groups.

    Args:
        root: root of the file system that has ``proc`` and ``sys``.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        # Linux has control groups, macOS has none.
        return limit
    top = root / "sys/fs/cgroup"
    # Lines with another start are of control groups of version 1.
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        for group in (top / path, *(top / path).parents):
            file = group / "memory.max"
            text = file.read_text().strip() if file.exists() else "max"
            if text != "max":
                limit = min(limit, int(text))
    return limit


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
    return _status("VmRSS:")


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
    peak = _status("VmHWM:")
    if device.type != "cpu" or not peak or not before:
        return None, "nothing here tells"
    return max(peak - before, 0), "that the process grew by, libraries included"


def _status(field: str) -> int:
    """A number of bytes in /proc/self/status; 0 if the system has no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(field):
            # In kB of 1,024 bytes.
            return 1024 * int(line.split()[1])
    return 0
