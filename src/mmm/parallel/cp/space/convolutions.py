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
        stride = module.stride[index]
        dilated = (module.kernel_size[index] - 1) * module.dilation[index]
        # Number of rows before the field, and before and after it together.
        if module.padding == "same":
            before = dilated // 2
            padding = dilated
        elif module.padding == "valid":
            before = 0
            padding = 0
        else:
            before = module.padding[index]
            padding = 2 * before
        rows = (axis.length + padding - dilated - 1) // stride + 1
        out = resized(axis.have, rows)
        x = axis.take(x, reach(out, stride, before, dilated + 1), module.padding_mode)
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
            # Rounded up. A stride above the kernel leaves gaps: then the last row that is not after o.
            first_term = -((dilated - padding - first) // stride)
            first_row = min(first_term, (first + padding) // stride)
            last_row = (end - 1 + padding) // stride
            want.append((first_row, last_row + 1))
        x = axis.take(x, tuple(want))
        # Rows behind the last term: they have only the bias.
        extra.append(max(stride - 1 - dilated, 0))
        first, end = out[axis.rank]
        begin = want[axis.rank][0] * stride - padding
        cuts.append((axis.dim, first - begin, end - first))
    convolve = CONVOLVE_TRANSPOSED[len(module.kernel_size)]
    y: Tensor = convolve(x, module.weight, module.bias, module.stride, 0, extra, module.groups, module.dilation)
    for cut in cuts:
        y = y.narrow(*cut)
    return y
