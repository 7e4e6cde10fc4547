"""Optimizer state on a local disk: AdamW's moments in a memory-mapped file, of which a unit is in memory at a time.

::

    host's memory   shards of parameters, their gradients                   (`mmm.parallel.memory.offload`)
    disk            moments   ┌ unit 0 ┬ unit 1 ┬ unit 2 ┬ … ┐              2 elements a parameter and rank
                              └────────┴────────┴────────┴───┘
    a step          read unit i (a page fault), update it in place, let go of its pages; unit i + 1

What a process lets go of stays in the system's page cache while there is room, and the system writes it; it is nobody's
anonymous memory. A unit is some parameters (`UNIT` bytes of moments, or one parameter).

The file has no name: it is this process's alone (mode 0600), other ranks of the host do not meet it, and the system
frees it when the process ends, however it ends. Its blocks are allocated before the first step, because a mapped page
that finds the disk full ends a process by SIGBUS.

Source: Rajbhandari et al., "ZeRO-Infinity", 2021 (which reads and writes by asynchronous I/O).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.errors import ConfigError, config_field
from mmm.parallel.local import to_local
from mmm.parallel.memory.offload import DISK
from mmm.parallel.optimizer import LocalAdamW
from mmm.torch_private.groups import dtensor_like

MOMENTS = ("exp_avg", "exp_avg_sq")
UNIT = 1 << 28  # bytes of moments that are in memory at once, unless one parameter has more
# What a mapped file is no local file on: a page fault would wait for a network, and its end is a SIGBUS.
REMOTE = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "panfs", "ceph", "cifs", "smb3", "9p", "afs", "daos", "wekafs"}


def check_disk(folder: Path) -> None:
    """Raises ConfigError where the optimizer's state cannot be kept in `folder`; writes nothing."""
    given = f"{config_field('offload')} {DISK}{folder}"
    if not folder.is_dir():
        raise ConfigError(f"{given}: there is no such folder; make it, or name another")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # without a name: nothing is left, and nothing was seen
    except OSError as error:
        raise ConfigError(f"{given}: no file can be made there ({error.strerror}); name another folder") from None
    kind = file_system(folder)
    if kind in REMOTE or kind.startswith("fuse."):
        raise ConfigError(f"{given}: it is on {kind}, over a network; name a folder of a disk of this host")


def file_system(path: Path) -> str:
    """The kind of the file system that a path is on, such as ``ext4``; "" where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    resolved, found = path.resolve(), ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if resolved.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, after.split()[0])
    return found[1]


class _MappedFile:
    """A nameless file of a fixed size in memory, all its blocks allocated, zero."""

    def __init__(self, folder: Path, size: int) -> None:
        """Raises ConfigError: it cannot be made, such as on a full disk."""
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _allocate(file.fileno(), size)
                self.pages = mmap.mmap(file.fileno(), size)  # has a descriptor of its own
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise ConfigError(
                f"{config_field('offload')} {DISK}{folder}: this rank's optimizer state takes {size / 1e6:,.2f} MB, "
                f"and the disk has {free / 1e6:,.2f} MB left ({error.strerror}): "
                f"name another folder, or use {config_field('offload')} host"
            ) from None

    def tensor(self, start: int, like: Tensor) -> Tensor:
        return torch.frombuffer(self.pages, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)

    def release(self, start: int, size: int) -> None:
        """Let go of the pages of a stretch; what was written to them is the file's."""
        self.pages.madvise(mmap.MADV_DONTNEED, start, size)


def _allocate(descriptor: int, size: int) -> None:
    """Give a file all its blocks. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(1 << 20)  # macOS has no such call
    while size:
        size -= os.write(descriptor, zeros[:size])


class DiskAdamW(LocalAdamW):
    """AdamW whose moments are in a file; a parameter group is a unit."""

    def __init__(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """
        Args:
            optimizer: AdamW without a step, whose groups this takes over; their parameters are on the host.

        Raises:
            ConfigError: the file cannot be made.
        """
        groups = [{**group, "params": unit} for group in optimizer.param_groups for unit in units_of(group["params"])]
        super().__init__(groups, fused=optimizer.defaults["fused"])  # groups have the rest
        self.stretches: list[tuple[int, int]] = []  # of each group in the file
        starts: dict[Tensor, tuple[int, ...]] = {}
        end = 0
        for group in self.param_groups:
            begin = end
            for parameter in group["params"]:
                size = _pages(to_local(parameter).nbytes)
                starts[parameter] = (end, end + size)
                end += 2 * size
            self.stretches.append((begin, end - begin))
        self.file = _MappedFile(folder, max(end, mmap.PAGESIZE))
        for parameter, both in starts.items():
            local = to_local(parameter.detach())
            moments = {
                key: _like(parameter, self.file.tensor(start, local) if local.numel() else torch.zeros_like(local))
                for key, start in zip(MOMENTS, both, strict=True)
            }
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        self.register_step_post_hook(lambda *_: self._release())

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        self._release()  # the unit before
        return super()._init_group(group, *tensors)

    def _release(self) -> None:
        for start, size in self.stretches:
            if size:
                self.file.release(start, size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's; what is loaded goes into the file."""
        mapped = {parameter: dict(state) for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, own in mapped.items():
            loaded = self.state[parameter]
            for key in MOMENTS:
                if key in loaded:
                    to_local(own[key]).copy_(to_local(loaded[key]))
            self.state[parameter] = {**own, "step": loaded.get("step", own["step"])}
            self._release()


def units_of(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours, as many as have `UNIT` bytes of moments together, and at least one."""
    unit: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = 2 * to_local(parameter).nbytes
        if unit and held + size > UNIT:
            yield unit
            unit, held = [], 0
        unit.append(parameter)
        held += size
    if unit:
        yield unit


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, on the host, sharded as a parameter is."""
    return dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local
