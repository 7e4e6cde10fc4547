"""Convolutions of a field that is split: a rank takes the rows on which its rows of the output depend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmm.parallel.cp.space.kernels import sides, taken, unpadded
from mmm.parallel.cp.space.split import Split
from mmm.parallel.cp.space.strips import moved, resized
from mmm.torch_private.module import paddings_of


def convolution(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.Conv1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    before, after = sides(paddings_of(module))
    rows = taken(split, module, x, before, after, module.padding_mode)
    return unpadded(module, rows, padding_mode="zeros")


def transposed_convolution(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.ConvTranspose1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    extra = []
    cuts = []
    for index, axis in enumerate(split.axes(module, x)):
        stride = module.stride[index]
        padding = module.padding[index]
        dilated = (module.kernel_size[index] - 1) * module.dilation[index]
        rows = (axis.length - 1) * stride - 2 * padding + dilated + module.output_padding[index] + 1
        # Rows of the output, counted with those that the padding cuts off.
        out = moved(resized(axis.have, rows), padding)
        # Row o of these has a term of row i of the input where o = i · stride + t · dilation.
        want = []
        for first, end in out:
            # The smallest i has the largest t. Rounded up.
            smallest = -((dilated - first) // stride)
            # A stride above the kernel leaves gaps, whose rows have no term: take the last row before the gap.
            first_row = min(smallest, first // stride)
            last_row = (end - 1) // stride
            want.append((first_row, last_row + 1))
        x = axis.take(x, tuple(want))
        # Rows of the last gap: they have only the bias.
        extra.append(max(stride - 1 - dilated, 0))
        # The rows that were taken also make rows of the output that are other ranks'.
        first, end = out[axis.rank]
        first_row, _ = want[axis.rank]
        cuts.append((axis.dim, first - first_row * stride, end - first))
    y = unpadded(module, x, output_padding=extra)
    for cut in cuts:
        y = y.narrow(*cut)
    return y
