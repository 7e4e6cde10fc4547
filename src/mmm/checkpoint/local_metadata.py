"""The part of a checkpoint's metadata that a rank needs.

DCP's metadata have an entry for each tensor of each rank that has saved, and DCP lets every rank read them all. Here
rank 0 alone reads them, and sends each rank the entries that overlap its own tensors: what a rank gets does not grow
with the number of ranks, and what all get together grows as that number does.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from mmm.checkpoint.manifest import FileSum
from mmm.checkpoint.storage import read_metadata
from mmm.errors import CheckpointError
from mmm.torch_private.checkpoint import chunks_of

Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in the full tensor
Name = str | tuple[str, str]  # in the model, whatever the group; or group and name, where several have one name
Needs = dict[Name, tuple[tuple[int, ...], list[Region]]]  # the full shape, and what is local of it


def needs_of(tensors: Mapping[Any, Tensor]) -> Needs:
    """What a rank is to load.

    Args:
        tensors: plain or DTensors, by `Name`.
    """
    return {
        name: (tuple(x.shape), [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks_of(x.detach())])
        for name, x in tensors.items()
    }


class Overlaps:
    """A checkpoint's metadata, to find in them what overlaps a box; on rank 0."""

    def __init__(self, found: Metadata) -> None:
        self.found = found
        self.chunks: dict[str, list[ChunkStorageMetadata]] = {}  # by where they begin along dim 0
        self.begins: dict[str, list[int]] = {}
        self.longest: dict[str, int] = {}  # along dim 0
        for name, entry in found.state_dict_metadata.items():
            chunks = sorted(cast(TensorStorageMetadata, entry).chunks, key=_begin)
            self.chunks[name], self.begins[name] = chunks, [_begin(chunk) for chunk in chunks]
            self.longest[name] = max((chunk.sizes[0] for chunk in chunks if chunk.sizes), default=0)

    def part(self, needs: Needs) -> Metadata:
        """What a rank with these needs is to have. Tensors that are in the checkpoint in another shape are in it whole,
        so that DCP says so."""
        state: dict[str, TensorStorageMetadata] = {}
        paths: Mapping[str, Any] = self.found.planner_data or {}
        for name, entry in cast(dict[str, TensorStorageMetadata], self.found.state_dict_metadata).items():
            group, of, *_ = map(str, paths.get(name, (name,) * 2))
            needed = needs.get(of, needs.get((group, of)))
            if needed is None:
                continue
            shape, boxes = needed
            chunks = self.chunks[name] if tuple(entry.size) != shape or not shape else self._overlapping(name, boxes)
            state[name] = replace(entry, chunks=chunks)
        indices = [MetadataIndex(name, chunk.offsets) for name, entry in state.items() for chunk in entry.chunks]
        stored = cast(dict, self.found.storage_data)
        storage = {index: stored[index] for index in indices}
        planner = {name: paths[name] for name in state if name in paths}
        return replace(self.found, state_dict_metadata=dict(state), storage_data=storage, planner_data=planner)

    def _overlapping(self, name: str, boxes: Sequence[Region]) -> list[ChunkStorageMetadata]:
        found = {}
        for offsets, sizes in boxes:
            first = bisect.bisect_right(self.begins[name], offsets[0] - self.longest[name])
            last = bisect.bisect_left(self.begins[name], offsets[0] + sizes[0])
            for chunk in self.chunks[name][first:last]:
                there = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
                if all(a < b + wide and b < a + long for a, long, b, wide in there):
                    found[chunk.offsets] = chunk
        return list(found.values())


def _begin(chunk: ChunkStorageMetadata) -> int:
    return chunk.offsets[0] if chunk.offsets else 0


def metadata_of_rank(folder: Path, files: Mapping[str, FileSum], tensors: Mapping[Any, Tensor]) -> Metadata:
    """The part of a checkpoint's metadata that this rank needs to load `tensors`, and the optimizer's state for them. A
    collective.

    Args:
        tensors: plain or DTensors, by `Name`.

    Raises:
        CheckpointError: the metadata cannot be read; on every rank.
    """
    needs = needs_of(tensors)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Overlaps(read_metadata(folder, files)).part(needs)
    main, world = dist.get_rank() == 0, dist.get_world_size()
    everyones: list[Any] = [None] * world
    dist.gather_object(needs, everyones if main else None)
    sent: list[Any] = [None] * world
    if main:
        try:
            index = Overlaps(read_metadata(folder, files))
            sent = [pickle.dumps(index.part(each)) for each in everyones]  # objects would take many times as much
        except CheckpointError as error:
            sent = [str(error)] * world
    received: list[Any] = [None]
    dist.scatter_object_list(received, sent if main else None)
    if isinstance(received[0], str):
        raise CheckpointError(received[0], on_every_rank=True)
    return pickle.loads(received[0])
