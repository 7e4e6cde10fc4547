"""Poolings of a field that is split, and the modules that pad one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmm.parallel.cp.space.kernels import sides, taken, unpadded
from mmm.parallel.cp.space.split import Split
from mmm.parallel.dp.batch_norm import GlobalSum


def pooling_problem(module: Any, *_: Any) -> str:
    """Why a pooling is refused; empty if it is not."""
    if module.ceil_mode:
        return "ceil_mode, whose last window is cut: pad the field, and leave it out"
    if getattr(module, "return_indices", False):
        return "return_indices, which are those of a strip"
    return ""


def max_pooling(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.MaxPool1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    # Padding is never the largest.
    rows = taken(split, module, x, module.padding, module.padding, fill=float("-inf"))
    return unpadded(module, rows)


def average_pooling(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.AvgPool1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """

    def pool(field: Tensor) -> Tensor:
        rows = taken(split, module, field, module.padding, module.padding)
        return unpadded(module, rows)

    y = pool(x)
    # nn.AvgPool1d has no divisor.
    if module.count_include_pad or getattr(module, "divisor_override", None):
        return y
    # One where the field is, and zero where its padding is: their mean is the share of a window in the field.
    return y / pool(x.new_ones(1, 1, *x.shape[2:]))


def mean_problem(module: Any, *_: Any) -> str:
    """Why an adaptive pooling is refused; empty if it is not."""
    sizes = getattr(module, "output_size", 1)
    if isinstance(sizes, int):
        sizes = (sizes,)
    if set(sizes) == {1}:
        return ""
    return f"output_size {sizes}: only the mean over the whole field, output_size 1"


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
    mean: Tensor = GlobalSum.apply(y, [split.group])
    return mean


def padded(outside: str, split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.ZeroPad2d, CircularPad2d and the others: each rank has its rows of the larger field.

    Args:
        outside: what the module puts around a field, as for `Axis.take`.
        x: (batch, channels, …), this rank's rows.
    """
    # The value of nn.ConstantPad1d, 2d and 3d.
    fill = getattr(module, "value", 0.0)
    # A row of the output is one row of the input, or of the padding.
    before, after = sides(module.padding)
    return taken(split, module, x, before, after, outside, fill)
