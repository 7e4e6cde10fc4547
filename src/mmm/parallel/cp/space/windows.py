"""Attention within windows of a field, which shift by a part of a window from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmm.parallel.cp.space.split import Split, of_dim
from mmm.parallel.cp.space.strips import moved, scaled, strips
from mmm.parallel.cp.space.take import with_length

# Names of a module's attributes: this package's and torchvision's.
WINDOW_NAMES = ("window", "window_size")
SHIFT_NAMES = ("shift", "shift_size")


def _size(module: Any, names: tuple[str, ...], index: int) -> int:
    """A size along one dim of space, under the first of the names that a module has."""
    sizes = [getattr(module, name) for name in names if hasattr(module, name)]
    size: int = of_dim(sizes[0], index)
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
    axis = split.row_axis(module, x)
    if axis is None:
        return forward(x)  # type: ignore[no-any-return]
    dim = axis.dim
    window = _size(module, WINDOW_NAMES, dim - 1)
    shift = _size(module, SHIFT_NAMES, dim - 1)
    # Rounded up. The windows lie over the ranks as rows do.
    windows = -(-axis.length // window)
    rolled = axis._replace(have=scaled(strips(windows, len(axis.have)), window))
    x = axis.take(x, moved(rolled.have, shift), rolled.length)
    rows = x.shape[dim]
    before = 0
    if shift:
        pieces = [x, x.new_zeros(with_length(x, dim, window))]
        if axis.rank == len(axis.have) - 1:
            pieces.reverse()
            before = window
        x = torch.cat(pieces, dim).roll(shift, dim)
    y = forward(x).roll(-shift, dim).narrow(dim, before, rows)
    return rolled.take(y, moved(axis.have, -shift), rolled.length)
