"""Saves checkpoints while training continues.

Each rank copies its tensors to the host, and ``dcp.save`` writes the copy in a thread of its own. In that thread the
ranks communicate over a process group of their own, because its collectives must not mix with those of the training.
So the training loop waits only for the copy, and for a save that has not ended when the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from mmm.checkpoint.manifest import PARTIAL, FileSum, Manifest, complete, discard
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.state import first_failure
from mmm.checkpoint.storage import Writer, one_line
from mmm.errors import CheckpointError
from mmm.outside import free_there
from mmm.torch_private.groups import dtensor_like
from mmm.torch_private.module import foreach_copy_

# Devices that copy to pinned memory while the host continues.
PINNED = ("cuda", "xpu")


# The names that lead to a tensor in nested mappings.
Names = tuple[str, ...]


class HostCopy:
    """Copies this rank's tensors to host memory, which every save uses again.

    The state must have the same structure at each save. DCP's own stager allocates new memory each time, and copies a
    DTensor that is on the host twice. New memory costs a page fault per page, which takes longer than the copy.
    """

    def __init__(self) -> None:
        self._copies: dict[Names, Tensor] = {}

    @torch.no_grad()
    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state. The copy is not changed until the next one is made.

        Args:
            state: nested mappings of tensors or DTensors.
        """
        leaves = dict(_leaves(state))
        copies = {}
        sources = []
        targets = []
        for path, tensor in leaves.items():
            copies[path] = self._buffer(path, tensor)
            sources.append(_local(tensor))
            targets.append(_local(copies[path]))
        self._copies = copies
        foreach_copy_(targets, sources, non_blocking=True)
        # The copies from these devices may still be under way.
        device_types = {source.device.type for source in sources}
        for device_type in device_types & set(PINNED):
            getattr(torch, device_type).synchronize()
        # An optimizer without tensors is empty, and yet has its place.
        copied: dict[str, Any] = {name: {} for name in state}
        for (*names, last), copy in self._copies.items():
            mapping = copied
            for name in names:
                mapping = mapping.setdefault(name, {})
            mapping[last] = copy
        return copied

    def _buffer(self, path: Names, tensor: Tensor) -> Tensor:
        """Memory on the host for a copy of a tensor: that of the last save, if it still fits."""
        local = _local(tensor)
        pinned = local.device.type in PINNED
        old = self._copies.get(path)
        if old is not None and isinstance(old, DTensor) == isinstance(tensor, DTensor):
            old_local = _local(old)
            if old_local.shape == local.shape and old_local.dtype == local.dtype:
                return old
        buffer = torch.empty_like(local, device="cpu", pin_memory=pinned)
        if isinstance(tensor, DTensor):
            # DTensor.from_local would copy it back to the mesh's device.
            return dtensor_like(buffer, tensor)
        return buffer


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach()


def _leaves(state: Mapping[str, Any], path: Names = ()) -> Iterator[tuple[Names, Tensor]]:
    """Yield every tensor of nested mappings with the names that lead to it."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield (*path, name), value
        else:
            yield from _leaves(value, (*path, name))


@dataclass
class Saver:
    """Saves into one folder of checkpoints.

    Attributes:
        folder: folder on a file system that all ranks share.
        group: process group of all ranks that sends from the host and is used for nothing else.
        keep: number of checkpoints that stay, the newest ones.
        failed: called on every rank with the reason if a save has failed. Training continues.
        metadata: what each checkpoint says about the model besides its sizes.
    """

    folder: Path
    group: dist.ProcessGroup | None
    keep: int
    failed: Callable[[str], None]
    metadata: ModelMetadata = field(default_factory=ModelMetadata)
    # Step of the save under way, and its future.
    _running: tuple[int, Future] | None = None
    # Whether the newest save that has ended is complete.
    _complete: bool = True
    _host_copy: HostCopy = field(default_factory=HostCopy)

    def save(self, state: dict[str, Any], manifest: Manifest) -> None:
        """Begin a save, after waiting for the one before it. A collective of all ranks.

        Args:
            state: ``{"model": {name: tensor}, "optimizer": {parameter: {"exp_avg": tensor, …}}}`` of this rank, by
                names in the full model. It may change as soon as this returns.
            manifest: the manifest without its files; rank 0's is written.
        """
        self.wait()
        copied = self._host_copy.of(state)
        executor = ThreadPoolExecutor(1, "checkpoint")
        future = executor.submit(self.write, copied, manifest)
        self._running = (manifest.step, future)
        # The thread ends with the save; nobody waits for it here.
        executor.shutdown(wait=False)

    def write(self, state: dict[str, Any], manifest: Manifest) -> None:
        """Write a state that is on the host. A collective of all ranks, in the saver's thread."""
        partial = self.partial(manifest.step)

        # On rank 0, when all ranks have written.
        def finished(files: dict[str, FileSum]) -> None:
            hidden = [name for name in files if not (partial / name).exists()]
            if hidden:
                raise CheckpointError(f"rank 0 does not see {partial / hidden[0]}: hosts have to share --outdir")
            about = manifest.about | self.metadata.describe()
            own_files = self.metadata.write_files(partial)
            full = replace(manifest, about=about, files=files | own_files)
            full.write(partial)
            complete(partial, self.keep)

        dcp.save(state, storage_writer=Writer(partial, finished), process_group=self.group)

    def partial(self, step: int) -> Path:
        """The folder that a checkpoint is written to."""
        return self.folder / f"step-{step}{PARTIAL}"

    def poll(self) -> None:
        """Call `failed` if a save has failed meanwhile. Does not wait for a save under way."""
        if self._running is None:
            return
        _, future = self._running
        if future.done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save under way. Returns False if the newest save has failed."""
        if self._running is None:
            return self._complete
        step, future = self._running
        self._running = None
        self._complete = False
        try:
            future.result()
        # Whatever it is, training continues. CheckpointException is not an Exception.
        except (Exception, CheckpointException) as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                # The disk may be full.
                discard(self.partial(step))
            cause = first_failure(error)
            where = ""
            if isinstance(cause, OSError):
                where = f"; it was for {self.folder.absolute()}: {free_there(self.folder)}"
            self.failed(f"no checkpoint of step {step}: {one_line(cause)}{where}")
        else:
            self._complete = True
        return self._complete
