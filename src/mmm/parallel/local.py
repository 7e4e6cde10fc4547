"""This rank's local tensor of a sharded one: which shard of the full tensor it is, how it starts, how it is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mmm.nn import init
from mmm.nn.init import accum_dtype
from mmm.torch_private.groups import device_types
from mmm.torch_private.operators import GATHERS_STRIDED


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local tensor of a `DTensor`. A plain tensor is returned as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def detached(loss: Tensor) -> Tensor:
    """A scalar without its graph, as `accum_dtype`, to add up on its device.

    Args:
        loss: plain, or replicated over a mesh.
    """
    return to_local(loss.detach()).to(accum_dtype(loss.device))


def to_group_device(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`tensor`, or its copy on the accelerator where it is on the host (offload) and `group` sends nothing from there:
    groups of accelerators have only their own backend."""
    devices = device_types(group)
    types = {device.type for device in devices}
    if not devices or tensor.device.type in types:
        return tensor
    return tensor.to(devices[0])


def unsharded(tensor: Tensor) -> Tensor:
    """The full tensor of a `DTensor`, on its mesh's device. A plain tensor is returned as it is.

    A collective of the ranks of its mesh: an all-gather along each axis that shards it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    # With offload it lies on the host.
    on_device: Any = tensor.to(mesh.device_type)
    shards = shards_of(on_device)
    dims = [dim for _axis, dim in shards]
    if GATHERS_STRIDED or len(set(dims)) == len(dims):
        return on_device.full_tensor()
    # Several axes shard a dim: the sharding that was applied last is undone first.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shard = on_device.to_local()
    while shards:
        axis, dim = shards.pop()
        earlier = [(other_dim, mesh.size(other), coordinate[other]) for other, other_dim in shards]
        shape = list(shard.shape)
        shape[dim] = shard_box(tuple(tensor.shape), earlier).length[dim]
        of_axis = DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)
        stride = torch.empty(shape, device="meta").stride()
        sharded: Any = DTensor.from_local(
            shard, of_axis, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        shard = sharded.full_tensor()
    return shard


def local_box(parameter: Tensor) -> init.ShardBox:
    """The shard of the full parameter that is local to this rank."""
    if not isinstance(parameter, DTensor):
        return init.full_box(parameter)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shards = []
    for axis, dim in shards_of(parameter):
        ranks = mesh.size(axis)
        shards.append((dim, ranks, coordinate[axis]))
    full_shape = tuple(parameter.shape)
    box = shard_box(full_shape, shards)
    shape = tuple(parameter.to_local().shape)
    assert shape == box.length, f"the local tensor is {shape}, computed {box.length} of {full_shape}"
    return box


def shards_of(parameter: DTensor) -> list[tuple[int, int]]:
    """(axis of its mesh, dim) for each sharding, in the order in which they are applied.

    Outer axes come first, except that strided shards come last: FSDP applies them over dp to what tensor parallel left,
    although dp is the outer axis.
    """
    plain = []
    strided = []
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        if type(placement) is Shard:
            plain.append((axis, dim))
        else:
            strided.append((axis, dim))
    return plain + strided


def shard_box(shape: tuple[int, ...], shards: Iterable[tuple[int, int, int]]) -> init.ShardBox:
    """The shard that one sharding after the other leaves of a tensor, each as ``torch.chunk`` splits.

    Args:
        shape: the shape of the full tensor.
        shards: (dim, ranks, coordinate) for each sharding.
    """
    start = [0] * len(shape)
    length = list(shape)
    for dim, ranks, coordinate in shards:
        # The last ranks may have fewer, or none.
        chunk = -(-length[dim] // ranks)
        first = min(coordinate * chunk, length[dim])
        rest = length[dim] - first
        start[dim] += first
        length[dim] = min(chunk, rest)
    return init.ShardBox(tuple(start), tuple(length), tuple(shape))
