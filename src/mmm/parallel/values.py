"""The values that the constructor of a user's own model has made, shard by shard."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from mmm.errors import ConfigError
from mmm.models.draw import ShardBox, canonical_name
from mmm.models.meta import kept_value, pop_value
from mmm.models.weights import class_name
from mmm.parallel.local import to_local
from mmm.runtime.log import get_logger

Values = Callable[[str, ShardBox], Tensor | None]
"""(canonical name, the shard that is local) → the shard, on any device and in any dtype; None for a buffer that keeps
what it has. A tied weight is asked for once, under its first name."""
NAMED = 3  # tensors that a message names


def check_sizes(model: nn.Module) -> None:
    """Raises ConfigError where a module of PyTorch's lazy ones does not know its sizes yet."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{names_in_message(lazy)} of {class_name(model)} would get its shape from the first input: give sizes"
        )


def constructed_values(model: nn.Module, mesh: DeviceMesh | None) -> Values:
    """What the constructor of `model` has put into its parameters (`mmm.models.meta`), each kept until it is asked for.

    A collective over `mesh`, or that of the parameters: where ranks have made different values, those of the first are
    taken, and that is said.

    Raises:
        ConfigError: parameters have no values; or the ranks have made different modules.
    """
    owners = {name: _owner(model, name) for name, _ in model.named_parameters()}
    if not owners:
        return lambda name, box: None
    lacking = [name for name, owner in owners.items() if kept_value(*owner) is None]
    if len(lacking) == len(owners):
        raise ConfigError(
            f"{canonical_name(lacking[0])} and the other parameters of {class_name(model)} have no values: build it on "
            f"the CPU, inside mmm.parallel.meta_parameters() or not; give it a method init_rule; or say where they "
            f'come from, by values=, or by init="by_name", which draws them from the seed and their names'
        )
    if lacking:
        raise ConfigError(
            f"parameter {canonical_name(lacking[0])} of {class_name(model)} has no values, and others have: construct "
            f'all of them on the CPU, with their sizes; or say where values come from, by weights= or init="by_name"'
        )
    if mesh is None:
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    by_name = {canonical_name(name): owner for name, owner in owners.items()}
    buffers = {canonical_name(name): to_local(buffer) for name, buffer in model.named_buffers()}
    differs = _constructed_differently(model, by_name, buffers, mesh)

    def read(name: str, box: ShardBox) -> Tensor | None:
        full = pop_value(*by_name[name]) if name in by_name else None
        if name in differs:
            assert mesh is not None
            full = _of_first_rank(buffers[name] if full is None else full, mesh)
        return None if full is None else shard_of(full, box)

    return read


def _constructed_differently(
    model: nn.Module,
    owners: Mapping[str, tuple[nn.Module, str]],
    buffers: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
) -> set[str]:
    """The names whose values are not the same on all ranks of `mesh`. A collective over it."""
    if mesh is None or mesh.size() == 1:
        return set()
    values = {name: kept_value(*owner) for name, owner in owners.items()}
    named = [(name, tensor) for name, tensor in (*values.items(), *buffers.items()) if tensor is not None]
    described = "".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n" for name, tensor in named)
    if _differs([zlib.crc32(described.encode())], mesh):
        raise ConfigError(
            f"ranks have constructed {class_name(model)} with different parameters or buffers: what it is made of may "
            f"not depend on the rank",
            on_every_rank=True,
        )
    names = [named[place][0] for place in _differs([_checksum(tensor) for _, tensor in named], mesh)]
    if names and dist.get_rank() == 0:
        get_logger().warning(
            "ranks have constructed %s of %s with different values: those of the first rank are taken; seed all ranks "
            "alike before, as build_model does, and let no constructor depend on the rank or the time",
            names_in_message(names),
            class_name(model),
        )
    return set(names)


def _of_first_rank(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the first rank of `mesh`. A collective over it."""
    copy = tensor.detach().to(mesh.device_type, memory_format=torch.contiguous_format, copy=True)
    for axis in range(mesh.ndim):
        dist.broadcast(copy.view(-1).view(torch.uint8), group=mesh.get_group(axis), group_src=0)
    return copy


def _differs(integers: list[int], mesh: DeviceMesh) -> list[int]:
    """The places at which the ranks of `mesh` have other numbers. A collective."""
    low, high = (torch.tensor(integers, dtype=torch.int64, device=mesh.device_type) for _ in range(2))
    for axis in range(mesh.ndim):
        dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return (low != high).nonzero().flatten().tolist()


def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def shard_of(full: Tensor, box: ShardBox) -> Tensor:
    return full[tuple(slice(start, start + length) for start, length in zip(box.start, box.length, strict=True))]


def names_in_message(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" (and {len(names) - NAMED} more)" if len(names) > NAMED else "")
