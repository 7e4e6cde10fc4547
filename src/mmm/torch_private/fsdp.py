"""Private names of FSDP: its records of units, of the parameters that a unit gathers together, and of each of these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mmm.torch_private.module import version_of


def state_of(unit: Any) -> Any:
    """FSDP's record of a unit, which its modules share if it has several.

    Private: FSDPModule._get_fsdp_state, seen in 2.10 to 2.14; instead: nothing."""
    return unit._get_fsdp_state()


def groups_of(unit: Any) -> list[Any]:
    """FSDP's own records of the parameters that it gathers together for `unit`.

    Private: FSDPState._fsdp_param_groups, seen in 2.12 to 2.14, before that _fsdp_param_group; instead: nothing."""
    state = state_of(unit)
    one = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
    return list(getattr(state, "_fsdp_param_groups", [one] if one else []))


def unsharded_of(parameter: Any) -> Tensor | None:
    """Of FSDP's record of a parameter, the parameter that it gathers; None before it has been.

    Private: FSDPParam._unsharded_param, seen in 2.10 to 2.14; instead: nothing."""
    return getattr(parameter, "_unsharded_param", None)


def shards_version(shards: Iterable[Any]) -> int:
    """Of shards, `DTensor`: higher after each change.

    Private: DTensor._local_tensor, seen in 2.10 to 2.14; instead: to_local, which makes a view."""
    return sum(version_of(shard) + version_of(shard._local_tensor) for shard in shards)


def set_local(parameter: Any, local: Tensor) -> None:
    """Give a parameter, plain or a `DTensor`, other memory for its local tensor, of the same shape.

    Private: DTensor._local_tensor, seen in 2.10 to 2.14; instead: to_local, which makes a view."""
    if hasattr(parameter, "_local_tensor"):
        parameter._local_tensor = local
    else:
        parameter.data = local


def pre_backward(unit: Any) -> Any:
    """The hook of a tensor by which FSDP gathers a unit for backward.

    Private: FSDPState._pre_backward, seen in 2.10 to 2.14; instead: nothing."""
    return state_of(unit)._pre_backward
