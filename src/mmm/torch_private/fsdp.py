"""Private names of FSDP: its records of units, of parameters that are gathered together, and of single parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mmm.torch_private.module import version_of


def state_of(unit: Any) -> Any:
    """Return FSDP's record of a unit. If a unit has several modules, they share the record.

    Private: FSDPModule._get_fsdp_state, seen in 2.10 to 2.14. No public replacement.
    """
    return unit._get_fsdp_state()


def groups_of(unit: Any) -> list[Any]:
    """Return FSDP's own records of the parameters that it gathers together for `unit`.

    Private: FSDPState._fsdp_param_groups, seen in 2.12 to 2.14, before that _fsdp_param_group. No public replacement.
    """
    state = state_of(unit)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # A unit without parameters has no group.
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group else []


def unsharded_of(parameter: Any) -> Tensor | None:
    """Return the gathered parameter of FSDP's record of a parameter; None before it was gathered first.

    Private: FSDPParam._unsharded_param, seen in 2.10 to 2.14. No public replacement.
    """
    return getattr(parameter, "_unsharded_param", None)


def widen_gradient(parameter: Any) -> None:
    """Give the gradient of FSDP's record of a parameter the dtype that FSDP sums it in. The parameter is gathered.

    Private: FSDPParam's three names, seen in 2.8 to 2.14. From 2.15 on autograd itself makes gradients of that dtype,
    and the names are gone. No public replacement.
    """
    if not hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
        return
    parameter.accumulate_unsharded_grad_if_needed()
    if parameter.unsharded_accumulated_grad is None:
        parameter.to_accumulated_grad_if_needed()


def shards_version(shards: Iterable[Any]) -> int:
    """Return a number that grows with each change of shards, which are `DTensor`s.

    Private: DTensor._local_tensor, seen in 2.10 to 2.14. Public replacement: to_local, which makes a view.
    """
    # A change through the DTensor counts for the DTensor, one through its local tensor for that.
    return sum(version_of(shard) + version_of(shard._local_tensor) for shard in shards)


def set_local(parameter: Any, local: Tensor) -> None:
    """Give a parameter, plain or a `DTensor`, another local tensor of the same shape.

    Private: DTensor._local_tensor, seen in 2.10 to 2.14. Public replacement: to_local, which makes a view.
    """
    if hasattr(parameter, "_local_tensor"):
        parameter._local_tensor = local
    else:
        parameter.data = local


def pre_backward(unit: Any) -> Any:
    """Return the tensor hook by which FSDP gathers a unit for its backward.

    Private: FSDPState._pre_backward, seen in 2.10 to 2.14. No public replacement.
    """
    return state_of(unit)._pre_backward
