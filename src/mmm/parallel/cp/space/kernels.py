"""Modules with a kernel: a rank takes the rows on which its rows of the output depend, and calls the module's own
forward without its padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmm.parallel.cp.space.split import Split, of_dim, other_values
from mmm.parallel.cp.space.strips import reach


def taken(
    split: Split,
    module: Any,
    x: Tensor,
    before: Any,
    after: Any,
    outside: str = "zeros",
    fill: float = 0.0,
) -> Tensor:
    """The rows of x on which this rank's rows of a module's output depend, padding included.

    Args:
        x: (batch, channels, …), this rank's rows.
        before: number of rows of padding before the field, of each dim of space, or one number for all.
        after: the same behind it.
        outside, fill: what the padding is, as for `Axis.take`.
    """
    # A module that only pads has none of these.
    kernel = getattr(module, "kernel_size", 1)
    stride = getattr(module, "stride", 1)
    dilation = getattr(module, "dilation", 1)
    for index, axis in enumerate(split.axes(module, x)):
        # From a kernel's first row to its last.
        span = (of_dim(kernel, index) - 1) * of_dim(dilation, index) + 1
        want = reach(axis.have, span, of_dim(stride, index), of_dim(before, index), of_dim(after, index))
        x = axis.take(x, want, outside, fill)
    return x


def unpadded(module: Any, rows: Tensor, **changes: Any) -> Tensor:
    """The module's own output for rows whose padding is among them.

    Args:
        changes: further attributes that it has in place of its own.
    """
    changes["padding"] = (0,) * (rows.ndim - 2)
    with other_values(module.__dict__, changes):
        return type(module).forward(module, rows)  # type: ignore[no-any-return]


def sides(paddings: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The paddings before each dim of space, and those behind it, of PyTorch's (left, right, top, bottom), the last
    dim first."""
    return paddings[-2::-2], paddings[::-2]
