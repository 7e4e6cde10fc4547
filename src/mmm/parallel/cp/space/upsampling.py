"""Larger fields: upsampling, and pixels out of channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmm.parallel.cp.space.split import Split
from mmm.parallel.cp.space.strips import resized

# Mode of nn.Upsample → the same for one dim.
MODES = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
}


def upsampling_problem(module: Any, *_: Any) -> str:
    """Why an upsampling is refused; empty if it is not."""
    if module.mode not in MODES:
        return f"mode {module.mode}: use one of {', '.join(MODES)}"
    return ""


def _of_dim(value: Any, index: int) -> Any:
    """The size or factor of one dim of space; None if there is none."""
    if isinstance(value, tuple):
        return value[index]
    return value


def upsampling(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.Upsample, nearest or linear, one dim after the other.

    Args:
        x: (batch, channels, …), this rank's rows.
    """
    mode = MODES[module.mode]
    is_linear = mode == "linear"
    for index, axis in enumerate(split.axes(module, x)):
        # PyTorch itself says where rows of the output lie: it upsamples the numbers of the rows.
        row_numbers = torch.arange(axis.length, dtype=torch.float64, device=x.device).view(1, 1, -1)
        places = F.interpolate(
            row_numbers,
            _of_dim(module.size, index),
            _of_dim(module.scale_factor, index),
            mode,
            module.align_corners,
            module.recompute_scale_factor,
        ).flatten()
        # (rows,): the row of the input below each row of the output, and the one above.
        below = places.long()
        above = below
        if is_linear:
            above = (below + 1).clamp(max=axis.length - 1)
        out = resized(axis.have, len(places))
        want = tuple((int(below[first]), int(above[end - 1]) + 1) for first, end in out)
        x = axis.take(x, want)
        own = slice(*out[axis.rank])
        first_row = want[axis.rank][0]
        low = x.index_select(axis.dim, below[own] - first_row)
        if not is_linear:
            x = low
            continue
        high = x.index_select(axis.dim, above[own] - first_row)
        # (rows, 1, …)
        after = x.ndim - axis.dim - 1
        weight = (places - below)[own].to(x.dtype).view(-1, *[1] * after)
        x = torch.lerp(low, high, weight)
    return x


def pixel_shuffle(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.PixelShuffle.

    Args:
        x: (batch, channels, rows, columns), this rank's rows.
    """
    factor = module.upscale_factor
    cuts = []
    for axis in split.axes(module, x):
        out = resized(axis.have, axis.length * factor)
        # The rows of the input of which an output row is a part.
        want = tuple((first // factor, -(-end // factor)) for first, end in out)
        x = axis.take(x, want)
        first, end = out[axis.rank]
        begin = want[axis.rank][0] * factor
        cuts.append((axis.dim, first - begin, end - first))
    y = F.pixel_shuffle(x, factor)
    for cut in cuts:
        y = y.narrow(*cut)
    return y
