"""Attention within windows of a field, which shift by a part of a window from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmm.parallel.cp.space.split import Split, of_dim
from mmm.parallel.cp.space.strips import moved, scaled, strips
from mmm.parallel.cp.space.take import Axis

# Names of a module's attributes: this package's and torchvision's.
WINDOW_NAMES = ("window", "window_size")
SHIFT_NAMES = ("shift", "shift_size")


def _size(module: Any, names: tuple[str, ...], index: int) -> int:
    """A size along one dim of space, under the first of the names that a module has."""
    name = next(name for name in names if hasattr(module, name))
    size: int = of_dim(getattr(module, name), index)
    return size


def windows_problem(module: Any, ranks: int, x: Tensor) -> str:
    """Why windows are refused; empty if they are not."""
    window = _size(module, WINDOW_NAMES, 0)
    windows = -(-x.shape[1] // window)
    if windows < ranks:
        return f"{windows} windows of {window} rows on cp {ranks}: each rank needs one; use a smaller cp"
    return ""


def shifted_windows(split: Split, module: Any, forward: Any, x: Tensor) -> Tensor:
    """A module whose forward pads a field to whole windows, rolls it by its shift, masks the windows in which the two
    ends of the field meet, attends within each window, and rolls back: as torchvision's ShiftedWindowAttention.

    A rank takes whole windows of the rolled field, and gives the module's own forward what becomes these by its roll.
    This forward masks its last window, which is the field's last on one rank only. There, an empty window is put
    before the others, and elsewhere behind them, where the mask does no harm.

    Args:
        x: (batch, rows, …, channels), this rank's rows.
    """
    back = []
    # The last dim is that of the channels.
    axes = [axis for axis in split.axes(module, x, 1) if axis.group is not None]
    for axis in axes:
        index = axis.dim - 1
        window = _size(module, WINDOW_NAMES, index)
        shift = _size(module, SHIFT_NAMES, index)
        # Rounded up. The windows lie over the ranks as rows do.
        windows = -(-axis.length // window)
        rolled = scaled(strips(windows, len(axis.have)), window)
        padded = rolled[-1][1]
        x = axis.take(x, moved(rolled, shift), padded)
        rows = x.shape[axis.dim]
        before = 0
        if shift:
            shape = list(x.shape)
            shape[axis.dim] = window
            empty = x.new_zeros(shape)
            is_last = axis.rank == len(axis.have) - 1
            if is_last:
                before = window
            pieces = (empty, x) if is_last else (x, empty)
            x = torch.cat(pieces, axis.dim).roll(shift, axis.dim)
        way_back = Axis(axis.dim, rolled, axis.rank, axis.group)
        back.append((way_back, shift, before, rows, moved(axis.have, -shift), padded))
    y: Tensor = forward(x)
    for way_back, shift, before, rows, want, padded in back:
        y = y.roll(-shift, way_back.dim).narrow(way_back.dim, before, rows)
        y = way_back.take(y, want, padded)
    return y
