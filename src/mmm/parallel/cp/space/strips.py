"""How the rows of a field lie over ranks, and which rows of an input a rank needs for its rows of an output."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from mmm.errors import LayoutError

# For each rank its first row, and the row after its last.
Bounds = tuple[tuple[int, int], ...]


def strips(length: int, ranks: int) -> Bounds:
    """Split `length` rows into consecutive strips that differ by one row at most.

    Raises:
        LayoutError: there are fewer rows than ranks.
    """
    if length < ranks:
        raise LayoutError(
            f"cp_style space: a field of {length} rows on cp {ranks}: each rank needs a row at every level of the "
            f"model; use a smaller cp"
        )
    edges = [rank * length // ranks for rank in range(ranks + 1)]
    return tuple(pairwise(edges))


def own_slice(rows: int, ranks: int, rank: int) -> slice:
    """Which of the rows of a field a rank has, to read only these from a file."""
    return slice(*strips(rows, ranks)[rank])


def own_rows(field: Tensor, ranks: int, rank: int, dim: int = 2) -> Tensor:
    """The rows of a full field that a rank has. A view.

    Args:
        dim: the dim of its rows.
    """
    first, end = strips(field.shape[dim], ranks)[rank]
    return field.narrow(dim, first, end - first)


def resized(have: Bounds, length: int) -> Bounds:
    """How an operator's output of `length` rows lies over the ranks: as its input if it has as many rows, else as
    `strips`."""
    if length == have[-1][1]:
        return have
    return strips(length, len(have))


def whole(have: Bounds) -> Bounds:
    """All rows, for each rank."""
    length = have[-1][1]
    return ((0, length),) * len(have)


def moved(bounds: Bounds, rows: int) -> Bounds:
    """Return the bounds, `rows` further down."""
    return tuple((first + rows, end + rows) for first, end in bounds)


def scaled(bounds: Bounds, factor: int) -> Bounds:
    """Return the bounds in units of which a row has `factor`."""
    return tuple((first * factor, end * factor) for first, end in bounds)


def reach(have: Bounds, span: int, stride: int = 1, before: int = 0, after: int = 0) -> Bounds:
    """The rows on which each rank's rows of a convolution, a pooling or a padding depend. They may lie outside of the
    field.

    Args:
        have: how the rows of the input lie.
        span: number of rows from a kernel's first to its last.
        before: number of rows of padding before the field, and `after` it.
    """
    length = have[-1][1]
    rows = (length + before + after - span) // stride + 1
    out = resized(have, rows)
    # From where the kernel of the first row begins to where that of the last one ends.
    return tuple((first * stride - before, (end - 1) * stride - before + span) for first, end in out)
