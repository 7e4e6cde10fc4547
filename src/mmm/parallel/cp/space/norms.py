"""Norms of each sample whose mean and variance are over a field that is split. Sums are over all of its ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmm.parallel.cp.space.split import Split
from mmm.parallel.dp.batch_norm import global_statistics


def instance_problem(module: Any, *_: Any) -> str:
    """Why an InstanceNorm is refused; empty if it is not."""
    if getattr(module, "track_running_stats", False):
        return "track_running_stats: leave it out"
    return ""


def _normalized(
    split: Split,
    x: Tensor,
    first: int,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """x with mean 0 and variance 1 over the dims from `first` on and all ranks of the field, times the weight, plus
    the bias, where a norm has these. In float32 at least. A collective."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = list(range(first, x.ndim))
    mean, variance, _ = global_statistics(wide, dims, [split.group])
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    # One operator for the whole field, as each keeps its input for backward.
    return torch.addcmul(shift, wide, scale).to(x.dtype)


def group_norm(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.GroupNorm, and nn.InstanceNorm1d, 2d and 3d, which are a group for each channel.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    groups = getattr(module, "num_groups", x.shape[1])
    # (batch, groups, channels / groups, …)
    grouped = x.unflatten(1, (groups, -1))
    weights = []
    for weight in (module.weight, module.bias):
        if weight is not None:
            # Of channels: (groups, channels / groups, 1, …)
            weight = weight.view(*grouped.shape[1:3], *[1] * (x.ndim - 2))
        weights.append(weight)
    return _normalized(split, grouped, 2, module.eps, *weights).flatten(1, 2)


def layer_norm(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.LayerNorm. Over the channels it is local. Over rows as well, its weights are fields, of which a rank uses its
    own rows.

    Args:
        x: (…, *normalized_shape), this rank's rows.
    """
    first = x.ndim - len(module.normalized_shape)
    axis = split.row_axis(module, x, first)
    if axis is None:
        return forward(x)  # type: ignore[no-any-return]
    weights = []
    for weight in (module.weight, module.bias):
        if weight is not None:
            # It has no dims before `first`.
            weight = axis.own(weight, axis.dim - first)
        weights.append(weight)
    return _normalized(split, x, first, module.eps, *weights)
