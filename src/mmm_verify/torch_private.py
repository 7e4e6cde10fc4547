"""Every private name of PyTorch that this package uses: it begins with an underscore, or is in a module that does.

PyTorch may change such names at any time. ``Private:`` says in which versions each was seen, and what would replace it
("nothing": there is no public way).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh

# Private: torch.utils._pytree, seen in 2.10 to 2.14; instead: torch.utils.pytree, once it promises to stay.
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Private: nn.modules.batchnorm._BatchNorm, seen in 2.10 to 2.14; instead: the public classes, one by one.
BatchNorm = nn.modules.batchnorm._BatchNorm
# Private: nn.modules.conv._ConvNd, seen in 2.10 to 2.14; instead: the public classes, one by one.
Convolution = nn.modules.conv._ConvNd
# Private: how compile, checkpointing and FSDP1 name what they wrap, seen in 2.10 to 2.14; instead: nothing.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by what `function` returns for it, in place.

    Private: Module._apply, seen in 2.10 to 2.14; instead: nothing."""
    module._apply(function)


def version_of(tensor: Tensor) -> int:
    """The number of times that a tensor's memory has been written.

    Private: Tensor._version, seen in 2.10 to 2.14; instead: nothing."""
    return tensor._version


@dataclass(frozen=True)
class FlatPiece:
    """Where a parameter of the model is in a flat parameter of FSDP1.

    Attributes:
        name: its name, relative to the module that has the flat parameter.
        start: its first local element in the flat parameter.
        end: the element after its last one. A rank may have none of it.
    """

    name: str
    start: int
    end: int


def flat_pieces(parameter: nn.Parameter) -> list[FlatPiece] | None:
    """The model's parameters in a flat parameter of FSDP1; None for any other parameter.

    Private: attributes of FlatParameter, seen in 2.10 to 2.14; instead: nothing."""
    if not getattr(parameter, "_is_flat_param", False):
        return None
    pieces = []
    for name, info in zip(parameter._fqns, parameter._shard_param_infos, strict=True):  # type: ignore[attr-defined]
        # Both are None for a parameter that is not on this rank.
        start = info.offset_in_shard or 0
        length = info.numel_in_shard or 0
        pieces.append(FlatPiece(name, start, start + length))
    return pieces


def in_backward() -> bool:
    """Whether this thread is running backward. A forward that is recomputed runs inside of it.

    Private: torch._C._current_graph_task_id, seen in 2.10 to 2.14; instead: nothing."""
    return torch._C._current_graph_task_id() != -1


def import_dynamo() -> None:
    """Import torch.compile's parts, as DTensor and optimizers do at their first use. It takes a second.

    Private: torch._dynamo, seen in 2.10 to 2.14; instead: nothing."""
    import torch._dynamo  # noqa: F401


@contextlib.contextmanager
def default_timeout(limit: timedelta) -> Iterator[None]:
    """Inside, process groups that are made without a time-out, as those of a `DeviceMesh`, get this one.

    Private: distributed_c10d._get_default_timeout, seen in 2.10 to 2.14; instead: a timeout of init_device_mesh."""
    with replaced(dist.distributed_c10d, "_get_default_timeout", lambda backend: limit):
        yield


def all_groups() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in.

    Private: distributed_c10d._world, seen in 2.10 to 2.14; instead: nothing."""
    return list(dist.distributed_c10d._world.pg_names)


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of how operators are sharded.

    Private: DTensor._op_dispatcher, seen in 2.8 to 2.15, and the cache in C++, in 2.10 to 2.15; instead: nothing."""
    from torch.distributed.tensor import DTensor

    # Up to 2.9, only the function that the cache wraps can clear it.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()  # type: ignore[attr-defined]
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        clear_native()


def clear_redistribute_cache() -> None:
    """Clear DTensor's cache of how it goes from one placement to another.

    Private: torch.distributed.tensor._redistribute, seen in 2.10 to 2.14; instead: nothing."""
    from torch.distributed.tensor import _redistribute

    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    # Before 2.10 one function has a cache.
    if clear is None:
        clear = _redistribute._gen_transform_infos.cache_clear
    clear()


def forget_meshes() -> None:
    """Forget which mesh was cut out of which: PyTorch 2.8 and 2.9 take a later mesh of the same ranks for the earlier.

    Private: device_mesh._mesh_resources, seen in 2.8 to 2.15, with such records up to 2.9; instead: nothing."""
    # No ``with`` block of a mesh is open here: these are the only others.
    for records in vars(device_mesh._mesh_resources).values():
        records.clear()


@contextlib.contextmanager
def replaced_clipping(function: Callable[..., None]) -> Iterator[None]:
    """Inside, PyTorch's function that scales gradients down to a norm is called through `function`.

    `function` gets PyTorch's function as its first argument.

    Private: nn.utils.clip_grad._clip_grads_with_norm_, seen in 2.10 to 2.14, which `clip_grad_norm_` calls too;
    instead: nothing."""
    clip_grad = torch.nn.utils.clip_grad
    clip = clip_grad._clip_grads_with_norm_
    through = partial(function, clip)
    with (
        replaced(clip_grad, "_clip_grads_with_norm_", through),
        replaced(torch.nn.utils, "clip_grads_with_norm_", through),
    ):
        yield


# Whether ranks on CPUs average where `fully_shard` asks them to. Up to 2.8 gloo adds up, silently. That has no name to
# ask for: this one came with it.
GLOO_AVERAGES = hasattr(torch.accelerator, "memory_allocated")


@contextlib.contextmanager
def averaged_by_fsdp() -> Iterator[None]:
    """Inside, `fully_shard` asks for sums of gradients and divides them itself, where gloo does not average.

    Private: _fsdp_collectives._get_gradient_divide_factors, seen in 2.8, the last that needs it; instead: nothing."""
    if GLOO_AVERAGES:
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    name = "_get_gradient_divide_factors"
    divide = getattr(collectives, name)
    # The last argument is whether sums are asked for.
    with replaced(collectives, name, lambda *args: divide(*args[:-1], True)):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of `owner` has another value."""
    # Not unittest.mock.patch, which takes a third of a second to import.
    is_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            # It was inherited, as a module's forward from its class.
            delattr(owner, name)
