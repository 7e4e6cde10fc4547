"""Saving while training goes on.

This rank's tensors are copied to the host, and ``dcp.save`` writes the copy in a thread of its own. The ranks agree
there over a group of their own: a collective of the training must not get between. So the loop waits for the copy
alone, and for a save that has not ended when the next begins.
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
from mmm.checkpoint.state import one_line
from mmm.checkpoint.storage import Writer
from mmm.errors import CheckpointError
from mmm.torch_private.groups import dtensor_like
from mmm.torch_private.module import foreach_copy_

PINNED = ("cuda", "xpu")  # devices that copy to pinned memory while the host goes on


class HostCopy:
    """This rank's tensors, copied to the host into memory that every save uses again, of a state with one structure.

    DCP's own stager allocates anew each time, and copies a DTensor that is on the host twice. Memory that is new costs
    the system a fault a page, which is more than the copy.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy that stays as it is until the next is made. state: nested mappings of plain or DTensors."""
        found = dict(_leaves(state))
        self._made = {path: self._room(path, tensor) for path, tensor in found.items()}
        sources = [_local(tensor) for tensor in found.values()]
        foreach_copy_([_local(tensor) for tensor in self._made.values()], sources, non_blocking=True)
        for kind in {source.device.type for source in sources} & set(PINNED):
            getattr(torch, kind).synchronize()
        copied: dict[str, Any] = {name: {} for name in state}
        for (*names, last), tensor in self._made.items():
            at = copied
            for name in names:
                at = at.setdefault(name, {})
            at[last] = tensor
        return copied

    def _room(self, path: tuple[str, ...], tensor: Tensor) -> Tensor:
        made, local = self._made.get(path), _local(tensor)
        if made is not None and isinstance(made, DTensor) == isinstance(tensor, DTensor):
            there = _local(made)
            if there.shape == local.shape and there.dtype == local.dtype:
                return made
        room = torch.empty_like(local, device="cpu", pin_memory=local.device.type in PINNED)
        # Not by `from_local`, which would copy to the mesh's device.
        return dtensor_like(room, tensor) if isinstance(tensor, DTensor) else room


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _leaves(state: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield (*at, name), value
        else:
            yield from _leaves(value, (*at, name))


@dataclass
class Saver:
    """Saves into one folder of checkpoints.

    Attributes:
        folder: on a file system that all ranks share. group: of all ranks, for sending from the host, and for nothing
            else. keep: as for `mmm.checkpoint.manifest.complete`.
        failed: called on every rank with why a save has failed; the training goes on.
        metadata: what each checkpoint keeps of the model besides.
    """

    folder: Path
    group: dist.ProcessGroup | None
    keep: int
    failed: Callable[[str], None]
    metadata: ModelMetadata = field(default_factory=ModelMetadata)
    _running: tuple[int, Future] | None = None
    _complete: bool = True  # the newest save that has ended
    _host_copy: HostCopy = field(default_factory=HostCopy)

    def save(self, state: dict[str, Any], manifest: Manifest) -> None:
        """Begin to save; wait first for the save before it. A collective.

        Args:
            state: ``{"model": {name: tensor}, "optimizer": {parameter: {"exp_avg": tensor, …}}}`` of this rank, by
                names in the full model; it may change as soon as this returns.
            manifest: without files; rank 0's counts.
        """
        self.wait()
        copied = self._host_copy.of(state)
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._running = (manifest.step, thread.submit(self.write, copied, manifest))
        thread.shutdown(wait=False)  # it ends with the save

    def write(self, state: dict[str, Any], manifest: Manifest) -> None:
        """Write a state that is on the host. A collective; in the saver's thread."""
        partial = self.partial(manifest.step)

        def finished(files: dict[str, FileSum]) -> None:
            hidden = [name for name in files if not (partial / name).exists()]
            if hidden:
                raise CheckpointError(f"{partial / hidden[0]} is not there for rank 0: hosts have to share --outdir")
            about, others = manifest.about | self.metadata.describe(), self.metadata.write_tokenizer(partial)
            replace(manifest, about=about, files=files | others).write(partial)
            complete(partial, self.keep)

        dcp.save(state, storage_writer=Writer(partial, finished), process_group=self.group)

    def partial(self, step: int) -> Path:
        """The folder that a checkpoint is written to."""
        return self.folder / f"step-{step}{PARTIAL}"

    def poll(self) -> None:
        """Say by `failed` if a save has failed meanwhile. Waits for nothing."""
        if self._running is not None and self._running[1].done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save under way. Whether the newest, if there is one, is complete."""
        if self._running is None:
            return self._complete
        (step, future), self._running = self._running, None
        self._complete = False
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # whatever it is, the training goes on
            failures = error.failures if isinstance(error, CheckpointException) else {}
            first = next((each for each, _ in failures.values()), error)
            if not dist.is_initialized() or dist.get_rank() == 0:
                discard(self.partial(step))  # the disk may be full
            self.failed(f"no checkpoint of step {step}: {one_line(first)}")
        else:
            self._complete = True
        return self._complete
