"""This rank's local tensor of a sharded one, which part of the full tensor it is, and how it reaches other ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mmm.models import weights
from mmm.models.weights import accum_dtype
from mmm.torch_private.groups import device_types


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local tensor of a `DTensor`; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def detached(loss: Tensor) -> Tensor:
    """A scalar, plain or replicated over a mesh, without its graph and as `accum_dtype`, to add up on its device."""
    return to_local(loss.detach()).to(accum_dtype(loss.device))


def to_group_device(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`tensor`, or its copy on the accelerator where it is on the host, as with offload, and `group` sends nothing from
    there: accelerators' groups have their own backend alone."""
    devices = device_types(group)
    return tensor if not devices or tensor.device.type in {each.type for each in devices} else tensor.to(devices[0])


def unsharded(tensor: Tensor) -> Tensor:
    """The full tensor of a `DTensor`, on its mesh's device; a plain tensor is returned as it is. A collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]  # offload: from host


def local_box(parameter: Tensor) -> weights.ShardBox:
    """Which part of the full parameter is local to this rank.

    A dim that several axes shard is sharded by one after the other, each time as ``torch.chunk`` splits: outer axes
    first, except that strided shards (FSDP, applied over dp to what tensor parallel left) come last.
    """
    if not isinstance(parameter, DTensor):
        return weights.full_box(parameter)
    start, length = [0] * parameter.ndim, list(parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    shards = [(axis, p) for axis, p in enumerate(parameter.placements) if getattr(p, "dim", None) is not None]
    for axis, placement in sorted(shards, key=lambda pair: type(pair[1]) is not Shard):
        dim = placement.dim  # type: ignore[attr-defined]
        chunk = -(-length[dim] // parameter.device_mesh.size(axis))
        first = min(coordinate[axis] * chunk, length[dim])
        start[dim] += first
        length[dim] = min(chunk, length[dim] - first)
    shape = tuple(parameter.to_local().shape)
    assert shape == tuple(length), f"the local tensor is {shape}, computed {length} of {tuple(parameter.shape)}"
    return weights.ShardBox(tuple(start), tuple(length), tuple(parameter.shape))
