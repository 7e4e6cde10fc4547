"""Compares a rank's tensor with the full one: is it the shard it should be, and if not, what is it instead?

Such as a partial sum, twice the value, or another rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of, index_of_rows, relative, size_of
from mmm_verify.dtypes import dtype_name, widest
from mmm_verify.observe import LocalTensor
from mmm_verify.reference import ALIKE
from mmm_verify.shards import LocalShard
from mmm_verify.subject import Subject

# Relative: how far rounding may move what is computed in bf16.
LOW_PRECISION = 0.1
# Longer dims are not looked up row by row.
MAX_ROWS = 1 << 18
# Where a block may begin is first asked of so many of its elements.
PROBES = 16
# By DTensor's names. A stack is (rank, *shape of the tensor).
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}

# In what is said of tensors whose sum or mean over ranks is right.
NEVER = "never"
KEPT = "rank kept its own"
# A rank's tensor, and what it should be; None for what is not known.
Pair = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Place:
    """Which part of a full tensor is local.

    Attributes:
        indices: for each dim, the indices that are local; None for all of them.
        span: for a flat piece, its first element in the flattened full tensor and the one after its last; else None.
        padding: for each dim, the number of elements at the end that are padding, as of a padded vocabulary.
    """

    indices: tuple[Tensor | None, ...]
    span: tuple[int, int] | None = None
    padding: tuple[int, ...] = ()

    def of(self, full: Tensor) -> Tensor:
        """What a rank should have of the full tensor, without padding."""
        if self.span is not None:
            start, end = self.span
            return full.flatten()[start:end]
        for dim, index in enumerate(self.indices):
            if index is not None:
                full = full.index_select(dim, index)
        return full

    def unpadded(self, local: Tensor) -> Tensor:
        """A rank's tensor without its padding."""
        for dim, padding in enumerate(self.padding):
            if padding:
                length = max(0, local.shape[dim] - padding)
                local = local.narrow(dim, 0, length)
        return local


def place_of(tensor: LocalTensor, full: Tensor) -> Place | None:
    """Which part of `full` a tensor is. None if it is not a part of it.

    A DTensor says so itself. A plain tensor is looked up by its shape and elements. So is the DTensor of a weight that
    was cut by hand before: it knows only that part.
    """
    local = tensor.local
    if tensor.shard is not None:
        place = place_of_shard(tensor.shard, full)
        if place is not None:
            return place
        # This rank's shard of the part is empty.
        if not local.numel():
            return Place(tuple(torch.arange(size) for size in local.shape))
    if local.shape == full.shape:
        return Place((None,) * full.ndim)
    # FSDP1 cuts the flattened parameter, and may leave a rank an empty piece of it.
    if local.ndim == 1 and (full.ndim != 1 or not local.numel()):
        # An empty piece is nowhere: any place will do.
        start = next(block_starts(local, full.flatten()), None) if local.numel() else (0,)
        if start is None:
            return None
        return Place((), (start[0], start[0] + len(local)))
    if local.ndim != full.ndim or not local.numel():
        return None
    sharded_dims = dims_of_other_size(local, full)
    if len(sharded_dims) == 1:
        return _place_along(local, full, sharded_dims[0])
    return _place_of_block(local, full)


def dims_of_other_size(local: Tensor, full: Tensor) -> list[int]:
    """The dims along which two tensors of as many dims differ in size."""
    return [dim for dim in range(full.ndim) if local.shape[dim] != full.shape[dim]]


def place_of_shard(shard: LocalShard, full: Tensor) -> Place | None:
    """Where the shard is that a DTensor or an adapter describes. What is beyond the full tensor's end is padding."""
    if len(shard.full_shape) != full.ndim:
        return None
    indices: list[Tensor | None] = []
    padding: list[int] = []
    for index, padded_size, size in zip(shard.indices, shard.full_shape, full.shape, strict=True):
        if padded_size is not None and padded_size < size:
            return None
        if padded_size == size:
            indices.append(index)
            padding.append(0)
            continue
        if index is None:
            # All indices are local: then the rank knows how many there are.
            assert padded_size is not None
            index = torch.arange(padded_size)
        inside = index[index < size]
        # Padding is what comes last: anything else is another arrangement.
        if not torch.equal(index[: len(inside)], inside):
            return None
        indices.append(inside)
        padding.append(len(index) - len(inside))
    return Place(tuple(indices), padding=tuple(padding))


def _place_along(local: Tensor, full: Tensor, dim: int) -> Place | None:
    """Where a shard along one dim is: each of its rows is looked up. Unknown rows at the end are padding.

    Whether that is true shows when the ranks are put together: then no row of the full tensor is missing.
    """
    if full.shape[dim] > MAX_ROWS:
        return None
    index_of_row = index_of_rows(_rows(full, dim))
    indices: list[int] = []
    n_padded = 0
    for row in _rows(local, dim):
        index_or_none = index_of_row.get(bytes_of(row))
        if index_or_none is None:
            n_padded += 1
        elif n_padded:
            return None
        else:
            indices.append(index_or_none)
    # A rank with nothing but padding has zeros; anything else is a wrong shard.
    if not indices and local.any():
        return None
    padding = [0] * full.ndim
    padding[dim] = n_padded
    by_dim: list[Tensor | None] = [None] * full.ndim
    by_dim[dim] = torch.tensor(indices, dtype=torch.long)
    return Place(tuple(by_dim), padding=tuple(padding))


def _rows(tensor: Tensor, dim: int) -> Tensor:
    """A tensor as (size of `dim`, all other elements)."""
    if tensor.ndim == 1:
        return tensor[:, None]
    return tensor.movedim(dim, 0).flatten(1)


def _place_of_block(local: Tensor, full: Tensor) -> Place | None:
    """Where a block is that is shorter than the full tensor along several dims."""
    start = next(block_starts(local, full), None)
    if start is None:
        return None
    indices = []
    for first, length in zip(start, local.shape, strict=True):
        indices.append(torch.arange(first, first + length))
    return Place(tuple(indices))


def block_starts(block: Tensor, full: Tensor, near: float = 0.0) -> Iterator[tuple[int, ...]]:
    """For each place where a tensor has a block of elements, the first index along each dim.

    Args:
        block: as many dims as `full`, and at least one element.
        full: the tensor.
        near: how far elements may be off, relative. A NaN is the same as a NaN.
    """
    windows = full
    for dim, length in enumerate(block.shape):
        if length > full.shape[dim]:
            return
        windows = windows.unfold(dim, length, 1)
    # windows: (places along each dim, *shape of the block)
    may_begin = torch.ones(windows.shape[: block.ndim], dtype=torch.bool)
    probes = torch.linspace(0, block.numel() - 1, PROBES).long()
    for element in zip(*torch.unravel_index(probes, block.shape), strict=True):
        in_each = (..., *element)
        may_begin &= _are_near(windows[in_each], block[element], near)
    for place in map(tuple, may_begin.nonzero().tolist()):
        if _are_near(windows[place], block, near).all():
            yield place


def _are_near(own: Tensor, full: Tensor, near: float) -> Tensor:
    """Where two tensors have the same element, but for `near`."""
    if not own.is_floating_point() or own.dtype != full.dtype:
        return own == full
    return torch.isclose(own, full, rtol=near, atol=0.0, equal_nan=True)


def reduced(tensors: Sequence[LocalTensor | None], rank: int, n_reductions: int | None = None) -> Tensor | None:
    """A rank's tensor; for a partial DTensor, what its reduction over the ranks gives.

    Args:
        tensors: by rank, what each of them has; nothing is communicated.
        rank: whose tensor is wanted.
        n_reductions: how many of its reductions are made, outermost axes first. Default: all.

    Returns:
        The tensor; None if this rank, or one that it is reduced with, has none.
    """
    own = tensors[rank]
    if own is None:
        return None
    reductions = own.partial[:n_reductions]
    if not reductions:
        return own.local
    # The innermost axis last: each of its ranks has reduced over the outer axes before.
    last = reductions[-1]
    values = []
    for other in last.ranks:
        value = reduced(tensors, other, len(reductions) - 1)
        if value is None or value.shape != own.local.shape:
            return None
        values.append(value)
    # (ranks, *shape)
    stacked = torch.stack(values)
    if last.norm is not None:
        return torch.linalg.vector_norm(stacked, last.norm, 0)
    return REDUCTIONS[last.operation](stacked)


def describe_relation(
    value: Tensor | None,
    expected: Tensor,
    scale: float,
    rank: int,
    others: Callable[[int], Pair],
    alone: Tensor | None,
    subject: Subject,
    alike: float = ALIKE,
) -> str:
    """Say what a wrong tensor is instead of what it should be.

    Args:
        value: what the rank has.
        expected: what it should have.
        scale: what differences are divided by.
        rank: the rank.
        others: rank → its tensor, and what that should be.
        alone: what the plain model has for this rank's batch, without other ranks.
        subject: the program, with its mesh.
        alike: relative: two tensors this close are the same. In low precision that is the tolerance.
    """
    if value is None:
        return "is missing"
    if value.shape != expected.shape:
        return f"has shape {tuple(value.shape)} instead of {tuple(expected.shape)}"
    if not value.is_floating_point() and not value.is_complex():
        return "has other elements"
    if torch.isfinite(expected).all() and not torch.isfinite(value).all():
        return "is not finite"
    if size_of(value) == 0:
        return "is zero"
    if _rounds_more(value, expected):
        kind = dtype_name(value.dtype)
        if relative(value, expected, scale) < LOW_PRECISION:
            return f"is rounded to {kind}"
        return f"is {kind}, and differs"
    not_reduced = _over_ranks(value, expected, scale, rank, others, subject, alike)
    if not_reduced:
        return not_reduced
    factor = _factor(value, expected)
    if factor:
        size = size_of(value)
        # Any factor near 1 would fit a tensor that is nearly right: it has to explain most of the difference.
        near = min(alike, relative(value, expected, size) / 10)
        if relative(value, widest(expected) * factor, size) <= near:
            return f"{times(factor, subject, alike)} what it should be"
    if alone is not None and relative(value, alone, size_of(alone)) <= alike:
        return "is what this rank computes by itself, without the others: from its own samples, positions from 0"
    for other in range(subject.n_ranks):
        shard = others(other)[1]
        if other == rank or shard is None:
            continue
        if relative(value, shard, size_of(shard)) <= alike:
            return f"is rank {other}'s shard"
    return "differs"


def _rounds_more(value: Tensor, expected: Tensor) -> bool:
    """Whether a tensor is of a type with fewer digits than the right one."""
    return torch.finfo(value.dtype).eps > torch.finfo(expected.dtype).eps


def _factor(value: Tensor, expected: Tensor) -> float:
    """The factor times `expected` that is nearest to `value`; 0 if there is none."""
    own = widest(value).flatten()
    right = widest(expected).flatten()
    # Least squares: <expected, value> / <expected, expected>. The square of the norm is real, also of complex numbers.
    squared_norm = torch.linalg.vecdot(right, right).real.item()
    if not squared_norm:
        return 0.0
    product = torch.linalg.vecdot(right, own).real.item()
    factor = product / squared_norm
    if not math.isfinite(factor):
        return 0.0
    return factor


def _over_ranks(
    value: Tensor,
    expected: Tensor,
    scale: float,
    rank: int,
    others: Callable[[int], Pair],
    subject: Subject,
    alike: float,
) -> str:
    """Say whether the sum or mean over the ranks of an axis is right, and was never taken. See `describe_relation`."""
    for axis, size in subject.axes.items():
        if size == 1:
            continue
        group = []
        for other in subject.group(rank, axis):
            tensor = others(other)[0]
            if tensor is not None and tensor.shape == value.shape:
                group.append(tensor)
        if len(group) < size:
            continue
        # (ranks of the axis, *shape)
        stacked = widest(torch.stack(group))
        spread = size_of(stacked - stacked[0])
        # If all have the same, their mean says nothing.
        if spread <= alike * scale:
            continue
        if relative(stacked.sum(0), expected, scale) <= alike:
            return f"partial over {axis}: the ranks' values sum to what is right, but were {NEVER} summed"
        if relative(stacked.mean(0), expected, scale) <= alike:
            return (
                f"each {axis} {KEPT} value; their mean is correct but was {NEVER} taken (missing all-reduce "
                f"over {axis})"
            )
    return ""


def times(factor: float, subject: Subject, alike: float = 0.0) -> str:
    """A factor in words: ``2 times (the size of dp)``.

    Args:
        factor: the factor.
        subject: the program, with the sizes of its mesh.
        alike: how exactly the factor is known, relative.
    """
    near = max(1e-6, alike)
    for size in (*subject.axes.values(), subject.n_ranks):
        # Axes of one size have the same factor.
        axes = [axis for axis, other in subject.axes.items() if other == size]
        named = " or ".join(axes or ["the mesh"])
        # A factor of 1 would be the size of each axis that has one rank.
        if size == 1:
            continue
        if math.isclose(factor, size, rel_tol=near):
            return f"{size} times (the size of {named})"
        if math.isclose(factor, 1 / size, rel_tol=near):
            return f"1/{size} times (one over the size of {named})"
    if alike > 1e-6:
        return f"about {factor:.3g} times"
    digits = f"{factor:.6g}"
    # A factor that is not 1 is not shown as 1.
    if digits == "1":
        digits = f"{factor:.15g}"
    return f"{digits} times"
