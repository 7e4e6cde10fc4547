"""Convolutions of a field that is split: a rank takes the rows on which its rows of the output depend."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmm.parallel.cp.space.split import Split
from mmm.parallel.cp.space.strips import reach, resized

# By the number of dims of space.
CONVOLVE: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONVOLVE_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolution(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.Conv1d, 2d and 3d.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    for index, axis in enumerate(split.axes(module, x)):
        dilated = (module.kernel_size[index] - 1) * module.dilation[index]
        if module.padding == "same":
            before = dilated // 2
            after = dilated - before
        elif module.padding == "valid":
            before = 0
            after = 0
        else:
            before = module.padding[index]
            after = before
        want = reach(axis.have, dilated + 1, module.stride[index], before, after)
        x = axis.take(x, want, module.padding_mode)
    convolve = CONVOLVE[len(module.kernel_size)]
    # The padding is among the rows that were taken.
    y: Tensor = convolve(x, module.weight, module.bias, module.stride, 0, module.dilation, module.groups)
    return y


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
        out = resized(axis.have, rows)
        # Row o of the output has a term of row i of the input where o + padding = i · stride + t · dilation.
        want = []
        for first, end in out:
            # The smallest i has the largest t. Rounded up.
            smallest = -((dilated - padding - first) // stride)
            # A stride above the kernel leaves gaps, whose rows have no term: take the last row before the gap.
            first_row = min(smallest, (first + padding) // stride)
            last_row = (end - 1 + padding) // stride
            want.append((first_row, last_row + 1))
        x = axis.take(x, tuple(want))
        # Rows of the last gap: they have only the bias.
        extra.append(max(stride - 1 - dilated, 0))
        # The rows that were taken also make rows of the output that are other ranks'. This is the first of all.
        made_first = want[axis.rank][0] * stride - padding
        first, end = out[axis.rank]
        cuts.append((axis.dim, first - made_first, end - first))
    convolve = CONVOLVE_TRANSPOSED[len(module.kernel_size)]
    y: Tensor = convolve(x, module.weight, module.bias, module.stride, 0, extra, module.groups, module.dilation)
    for dim, start, length in cuts:
        y = y.narrow(dim, start, length)
    return y
