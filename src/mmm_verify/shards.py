"""Which part of a full tensor a rank has, as DTensor's placements say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mmm_verify.torch_private import WRAPPERS


@dataclass(frozen=True)
class ShardBox:
    """The shard of a tensor that is local: per dim the first index, the length and the full length, in elements."""

    start: tuple[int, ...]
    length: tuple[int, ...]
    full: tuple[int, ...]


def canonical_name(name: str) -> str:
    """``name`` without what compile, checkpoint, DDP or FSDP wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local tensor of a `DTensor`; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: DTensor) -> ShardBox | None:
    """Which part of the full tensor is local to this rank. None where shards have not the sizes of `torch.chunk`."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    start = [0] * tensor.ndim
    length = list(tensor.shape)
    for axis, dim in _shards_of(tensor):
        chunk = -(-length[dim] // mesh.size(axis))
        first = min(coordinate[axis] * chunk, length[dim])
        start[dim] += first
        length[dim] = min(chunk, length[dim] - first)
    if tuple(tensor.to_local().shape) != tuple(length):
        return None
    return ShardBox(tuple(start), tuple(length), tuple(tensor.shape))


def _shards_of(tensor: DTensor) -> list[tuple[int, int]]:
    """(axis of its mesh, dim) of each sharding, in the order in which they are applied: outer axes first, except that
    strided shards (FSDP, applied over dp to what tensor parallel left) come last."""
    shards = [(axis, p) for axis, p in enumerate(tensor.placements) if getattr(p, "dim", None) is not None]
    ordered = sorted(shards, key=lambda pair: type(pair[1]) is not Shard)
    return [(axis, placement.dim) for axis, placement in ordered]  # type: ignore[attr-defined]
