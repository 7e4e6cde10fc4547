"""Larger fields: upsampling, and pixels out of channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmm.parallel.cp.space.split import Split, of_dim
from mmm.parallel.cp.space.strips import resized, scaled

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
            of_dim(module.size, index),
            of_dim(module.scale_factor, index),
            mode,
            module.align_corners,
            module.recompute_scale_factor,
        ).flatten()
        # Rounding must not lead beyond the last row.
        places = places.clamp(max=axis.length - 1)
        out = resized(axis.have, len(places))
        # From the row below the first place to the row above the last one.
        want = tuple((int(places[first]), int(places[end - 1].ceil()) + 1) for first, end in out)
        x = axis.take(x, want)
        first_row = want[axis.rank][0]
        own = places[slice(*out[axis.rank])] - first_row
        below = own.long()
        y = x.index_select(axis.dim, below)
        if is_linear:
            above = x.index_select(axis.dim, own.ceil().long())
            # (rows, 1, …)
            after = x.ndim - axis.dim - 1
            weight = (own - below).to(x.dtype).view(-1, *[1] * after)
            y = torch.lerp(y, above, weight)
        x = y
    return x


def pixel_shuffle(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """nn.PixelShuffle.

    Args:
        x: (batch, channels, rows, columns), this rank's rows.
    """
    y: Tensor = forward(x)
    factor = module.upscale_factor
    for axis in split.axes(module, x):
        # A rank has made the rows of its own pixels, which need not be the strip that it is to have.
        made = axis._replace(have=scaled(axis.have, factor))
        y = made.take(y, resized(axis.have, made.length))
    return y
