"""Which elements of a full tensor a rank has, according to its DTensor's placements or to an adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from mmm_verify.torch_private import WRAPPERS


@dataclass(frozen=True)
class LocalShard:
    """The shard of a tensor that is local to a rank.

    Attributes:
        indices: for each dim, the indices that are local; None if all of them are.
        full_shape: the shape of the full tensor. A size is None if the rank does not know it.
    """

    indices: tuple[Tensor | None, ...]
    full_shape: tuple[int | None, ...]


def canonical_name(name: str) -> str:
    """``name`` without the components that compile, checkpoint, DDP or FSDP wrappers add to it."""
    return ".".join(component for component in name.split(".") if component not in WRAPPERS)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local tensor of a `DTensor`; a plain tensor is returned as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def local_shard(tensor: DTensor) -> LocalShard | None:
    """Which shard of the full tensor is local to this rank. None if the local tensor has another shape than that."""
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
        if len(index) == tensor.shape[dim]:
            indices.append(None)
        else:
            indices.append(index)
    return LocalShard(tuple(indices), tuple(tensor.shape))


def _local_indices(tensor: DTensor, dim: int, sizes: list[int], coordinate: list[int]) -> Tensor:
    """The indices along a dim that are local, in the order in which they lie in memory.

    Args:
        tensor: the DTensor.
        dim: the dim of the tensor.
        sizes: the size of each axis of its mesh.
        coordinate: this rank's coordinate on each axis.
    """
    # Axes of the mesh that shard this dim, outermost first: the order in which DTensor cuts.
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if _shards_dim(placement, dim, tensor.ndim):
            axes.append(axis)
    cut_first = []
    cut_last = []
    for position, axis in enumerate(axes):
        inner_axes = axes[position + 1 :]
        n_inner_shards = math.prod(sizes[inner] for inner in inner_axes)
        # Only a strided shard (_StridedShard) has this attribute.
        factor = getattr(tensor.placements[axis], "split_factor", 1)
        if factor > 1 and factor == n_inner_shards:
            # FSDP on top of tensor parallel: it cuts what the inner axes have left.
            cut_last.append((axis, 1))
        else:
            # Several matrices in one, as gate and up of an MLP: a rank has its shard of each of the `factor` pieces.
            cut_first.append((axis, factor))
    indices = torch.arange(tensor.shape[dim])
    for axis, factor in (*cut_first, *reversed(cut_last)):
        own = []
        for index in range(factor):
            piece = _chunk(indices, factor, index)
            own.append(_chunk(piece, sizes[axis], coordinate[axis]))
        indices = torch.cat(own)
    return indices


def _shards_dim(placement: Placement, dim: int, ndim: int) -> bool:
    """Whether a placement shards this dim of a tensor with `ndim` dims."""
    # Only shards have a dim. It may be negative.
    sharded_dim = getattr(placement, "dim", None)
    return sharded_dim is not None and sharded_dim % ndim == dim


def _chunk(indices: Tensor, n_chunks: int, index: int) -> Tensor:
    """One of the pieces of `torch.chunk`. It is empty if torch.chunk would make fewer pieces."""
    length = -(-len(indices) // n_chunks)
    return indices[index * length : (index + 1) * length]
