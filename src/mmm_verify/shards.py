"""Which part of a full tensor a rank has, as DTensor's placements say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from mmm_verify.torch_private import WRAPPERS


@dataclass(frozen=True)
class LocalPart:
    """The part of a tensor that is local.

    Attributes:
        indices: per dim, the indices that are local, None for all of them.
        full: the shape of the full tensor.
    """

    indices: tuple[Tensor | None, ...]
    full: tuple[int, ...]


def canonical_name(name: str) -> str:
    """``name`` without what compile, checkpoint, DDP or FSDP wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local tensor of a `DTensor`; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: DTensor) -> LocalPart | None:
    """Which part of the full tensor is local to this rank. None where the local tensor has another shape."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    local = tensor.to_local()
    indices: list[Tensor | None] = []
    for dim in range(tensor.ndim):
        index = _local_indices(tensor, dim, sizes, list(coordinate))
        if len(index) != local.shape[dim]:
            return None
        indices.append(index)
        if len(index) == tensor.shape[dim]:
            indices[dim] = None
    return LocalPart(tuple(indices), tuple(tensor.shape))


def _local_indices(tensor: DTensor, dim: int, sizes: list[int], coordinate: list[int]) -> Tensor:
    """The indices along a dim that are local, in the order in which they lie in memory.

    Shards are cut from the outer axis to the inner one. A strided shard whose factor is the number of the shards inside
    it is FSDP's, which cuts last what tensor parallel has left. Any other one says of itself how it lies: of two
    matrices in one, as gate and up of an MLP, a rank has its shard of each.
    """
    shards = [(axis, p) for axis, p in enumerate(tensor.placements) if _shards_dim(p, dim, tensor.ndim)]
    first, last = [], []
    for position, (axis, placement) in enumerate(shards):
        inner = math.prod(sizes[other] for other, _ in shards[position + 1 :])
        factor = getattr(placement, "split_factor", 1)
        if factor > 1 and factor == inner:
            last.append((axis, 1))
        else:
            first.append((axis, factor))
    indices = torch.arange(tensor.shape[dim])
    for axis, factor in (*first, *reversed(last)):
        chunks = [_chunk(piece, sizes[axis], coordinate[axis]) for piece in _pieces(indices, factor)]
        indices = torch.cat(chunks)
    return indices


def _shards_dim(placement: Placement, dim: int, ndim: int) -> bool:
    sharded = getattr(placement, "dim", None)
    return sharded is not None and sharded % ndim == dim


def _pieces(indices: Tensor, count: int) -> list[Tensor]:
    return [_chunk(indices, count, number) for number in range(count)]


def _chunk(indices: Tensor, count: int, number: int) -> Tensor:
    """One of the pieces of `torch.chunk`; an empty one where that makes fewer."""
    length = -(-len(indices) // count)
    return indices[number * length : (number + 1) * length]
