"""This rank's local tensor of a sharded one, which part of the full tensor it is, how it starts, and how it reaches
others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mmm.nn import draw
from mmm.nn.draw import accum_dtype
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


def local_box(parameter: Tensor) -> draw.ShardBox:
    """Which part of the full parameter is local to this rank."""
    if not isinstance(parameter, DTensor):
        return draw.full_box(parameter)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    mesh = parameter.device_mesh
    box = shard_box(
        tuple(parameter.shape), [(dim, mesh.size(axis), coordinate[axis]) for axis, dim in shards_of(parameter)]
    )
    shape = tuple(parameter.to_local().shape)
    assert shape == box.length, f"the local tensor is {shape}, computed {box.length} of {tuple(parameter.shape)}"
    return box


def shards_of(parameter: DTensor) -> list[tuple[int, int]]:
    """(axis of its mesh, dim) of each sharding, in the order in which they are applied: outer axes first, except that
    strided shards (FSDP, applied over dp to what tensor parallel left) come last."""
    shards = [(axis, p) for axis, p in enumerate(parameter.placements) if getattr(p, "dim", None) is not None]
    ordered = sorted(shards, key=lambda pair: type(pair[1]) is not Shard)
    return [(axis, placement.dim) for axis, placement in ordered]  # type: ignore[attr-defined]


def shard_box(shape: tuple[int, ...], shards: Iterable[tuple[int, int, int]]) -> draw.ShardBox:
    """The part of a tensor that is left of one sharding after the other, each as ``torch.chunk`` splits.

    Args:
        shape: of the full tensor. shards: (dim, ranks, coordinate) of each.
    """
    start, length = [0] * len(shape), list(shape)
    for dim, ranks, coordinate in shards:
        chunk = -(-length[dim] // ranks)
        first = min(coordinate * chunk, length[dim])
        start[dim] += first
        length[dim] = min(chunk, length[dim] - first)
    return draw.ShardBox(tuple(start), tuple(length), tuple(shape))


def draw_weights(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a model that lies on the meta device memory on `device`, and the weights that its ``init_rule``, for
    buffers ``buffer_rule``, draws from the seed by their names: each rank its own shards, the same on every mesh.

    `mmm.parallel.materialize` also takes models that have no such method, tie weights, or have buffers with values.

    Raises:
        ValueError: a weight has two names, or a tensor has memory already.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    once = {id(tensor): name for name, tensor in named}
    for name, tensor in named:
        if once[id(tensor)] != name or not to_local(tensor).is_meta:
            raise ValueError(f"{name} is tied, or has memory already: mmm.parallel.materialize keeps both")
    model.to_empty(device=device)
    own: Any = model
    parameters = [(name, tensor, own.init_rule(draw.canonical_name(name))) for name, tensor in model.named_parameters()]
    buffers = [(name, tensor, own.buffer_rule(draw.canonical_name(name))) for name, tensor in model.named_buffers()]
    draw.fill_all([*parameters, *buffers], seed, local_box, to_local, device)
