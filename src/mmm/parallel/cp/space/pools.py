"""Poolings of a field that is split, and the modules that pad one."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmm.parallel.cp.space.split import Split, of_dim
from mmm.parallel.cp.space.strips import reach
from mmm.parallel.dp.batch_norm import GlobalSum

# By the number of dims of space.
MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def pooling_problem(module: Any, *_: Any) -> str:
    """Why a pooling is refused; empty if it is not."""
    if module.ceil_mode:
        return "ceil_mode, whose last window is cut: pad the field, and leave it out"
    if getattr(module, "return_indices", False):
        return "return_indices, which are those of a strip"
    return ""


def _taken(split: Split, module: Any, x: Tensor, fill: float = 0.0) -> Tensor:
    """The rows of x, with their padding, on which this rank's rows of the output depend."""
    for index, axis in enumerate(split.axes(module, x)):
        kernel = of_dim(module.kernel_size, index)
        stride = of_dim(module.stride, index)
        padding = of_dim(module.padding, index)
        # Poolings that average have none.
        dilation = of_dim(getattr(module, "dilation", 1), index)
        span = (kernel - 1) * dilation + 1
        want = reach(axis.have, span, stride, padding, padding)
        x = axis.take(x, want, fill=fill)
    return x


def max_pooling(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.MaxPool1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    pool = MAX_POOL[x.ndim - 2]
    # Padding is never the largest. It is among the rows that were taken.
    rows = _taken(split, module, x, float("-inf"))
    y: Tensor = pool(rows, module.kernel_size, module.stride, 0, module.dilation)
    return y


def average_pooling(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.AvgPool1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    pool = AVG_POOL[x.ndim - 2]
    rows = _taken(split, module, x)
    # nn.AvgPool1d has none.
    divisor = getattr(module, "divisor_override", None)
    if divisor:
        quotient: Tensor = pool(rows, module.kernel_size, module.stride, divisor_override=divisor)
        return quotient
    y: Tensor = pool(rows, module.kernel_size, module.stride)
    if module.count_include_pad:
        return y
    # One where the field is, and zero where its padding is: (1, 1, …).
    ones = x.new_ones(1, 1, *x.shape[2:])
    inside = _taken(split, module, ones)
    # The share of each window that is in the field.
    share: Tensor = pool(inside, module.kernel_size, module.stride)
    return y / share


def mean_problem(module: Any, *_: Any) -> str:
    """Why an adaptive pooling is refused; empty if it is not."""
    sizes = getattr(module, "output_size", 1)
    if isinstance(sizes, int):
        sizes = (sizes,)
    if any(size != 1 for size in sizes):
        return f"output_size {module.output_size}: only the mean over the whole field, output_size 1"
    return ""


def mean_of_rows(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """The mean over the field of a module whose forward is one, such as nn.AdaptiveAvgPool1d, 2d and 3d to one place.
    A collective; each rank has the full mean.

    Args:
        x: this rank's rows.
    """
    y = forward(x)
    for axis in split.axes(module, x, 0):
        # Ranks have different numbers of rows.
        y = y * (x.shape[axis.dim] / axis.length)
    mean: Tensor = GlobalSum.apply(y, split.groups)
    return mean


def padded(outside: str, split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.ZeroPad2d, CircularPad2d and the others: each rank has its rows of the larger field.

    Args:
        outside: what the module puts around a field, as for `Axis.take`.
        x: (batch, channels, …), this rank's rows.
    """
    # The last dim comes first: (left, right, top, bottom).
    paddings = list(module.padding)
    for axis in split.axes(module, x):
        after = paddings.pop()
        before = paddings.pop()
        # A row of the output is one row of the input, or of the padding.
        want = reach(axis.have, 1, 1, before, after)
        # The value of nn.ConstantPad1d, 2d and 3d.
        x = axis.take(x, want, outside, fill=getattr(module, "value", 0.0))
    return x
