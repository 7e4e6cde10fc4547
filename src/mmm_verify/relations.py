"""How a tensor of a rank is to the full tensor: which part it is, and, where it is not that, what it is instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of, relative, size_of
from mmm_verify.observe import LocalTensor
from mmm_verify.shards import LocalPart
from mmm_verify.subject import Subject

ALIKE = 1e-7  # relative: a relation holds
LOW_PRECISION = 0.1  # relative: how far rounding may move what is computed in bf16
MOST_ROWS = 1 << 18  # that are looked up one by one
MOST_BLOCKS = 64  # places where a piece may begin that are looked at
# By the names that DTensor has for them.
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


@dataclass(frozen=True)
class Place:
    """Which part of a full tensor is local.

    Attributes:
        indices: per dim, its indices, None for all of them.
        span: of a flat part, where it begins and ends in the flattened full tensor; else None.
        padding: per dim, how many elements after those are none of the full tensor's: a vocabulary may be padded.
    """

    indices: tuple[Tensor | None, ...]
    span: tuple[int, int] | None = None
    padding: tuple[int, ...] = ()

    def of(self, full: Tensor) -> Tensor:
        """What is local of the full tensor, without padding."""
        if self.span is not None:
            return full.flatten()[slice(*self.span)]
        for dim, index in enumerate(self.indices):
            if index is not None:
                full = full.index_select(dim, index)
        return full

    def unpadded(self, local: Tensor) -> Tensor:
        """A local tensor without its padding."""
        for dim, padding in enumerate(self.padding):
            if padding:
                length = max(0, local.shape[dim] - padding)
                local = local.narrow(dim, 0, length)
        return local


def place_of(tensor: LocalTensor, full: Tensor) -> Place | None:
    """Which part of `full` a tensor is: as a DTensor says; else, of a plain one, by its shape and elements. None where
    it is no part of it."""
    if tensor.part is not None:
        return _place_of_part(tensor.part, full)
    local = tensor.local
    if local.shape == full.shape:
        return Place((None,) * full.ndim)
    if local.ndim == 1 and (full.ndim != 1 or not local.numel()):
        return _place_of_flat(local, full)
    if local.ndim != full.ndim or not local.numel():
        return None
    other = [dim for dim in range(full.ndim) if local.shape[dim] != full.shape[dim]]
    if len(other) == 1:
        return _place_along(local, full, other[0])
    return _place_of_block(local, full)


def _place_of_part(part: LocalPart, full: Tensor) -> Place | None:
    """Where a DTensor is. It may be longer than the full tensor: what is beyond is padding."""
    if len(part.full) != full.ndim:
        return None
    indices: list[Tensor | None] = []
    padding: list[int] = []
    for index, padded, size in zip(part.indices, part.full, full.shape, strict=True):
        if padded < size:
            return None
        if padded == size:
            indices.append(index)
            padding.append(0)
            continue
        if index is None:
            index = torch.arange(padded)
        inside = index[index < size]
        indices.append(inside)
        padding.append(len(index) - len(inside))
    return Place(tuple(indices), padding=tuple(padding))


def _place_of_flat(local: Tensor, full: Tensor) -> Place | None:
    """Where a piece of the flattened tensor is, as the older FSDP cuts it: it may be empty."""
    elements = full.flatten()
    if not local.numel():
        return Place((), (0, 0))
    for first in (elements == local[0]).nonzero().flatten()[:MOST_BLOCKS].tolist():
        if torch.equal(elements[first : first + len(local)], local):
            return Place((), (first, first + len(local)))
    return None


def _place_along(local: Tensor, full: Tensor, dim: int) -> Place | None:
    """Where rows are, looked up one by one. Those at the end that are not there are padding."""
    if full.shape[dim] > MOST_ROWS:
        return None
    known: dict[bytes, int] = {}
    for index, row in enumerate(_rows(full, dim)):
        known.setdefault(bytes_of(row), index)
    rows = [known.get(bytes_of(row)) for row in _rows(local, dim)]
    indices = [row for row in rows if row is not None]
    padded = len(rows) - len(indices)
    if None in rows[: len(indices)] or (not indices and local.any()):  # zeros alone may be padding alone
        return None
    if padded and indices and indices[-1] != full.shape[dim] - 1:  # padding comes after the last row
        return None
    padding = [0] * full.ndim
    padding[dim] = padded
    places: list[Tensor | None] = [None] * full.ndim
    places[dim] = torch.tensor(indices, dtype=torch.long)
    return Place(tuple(places), padding=tuple(padding))


def _rows(tensor: Tensor, dim: int) -> Tensor:
    if tensor.ndim == 1:
        return tensor[:, None]
    return tensor.movedim(dim, 0).flatten(1)


def _place_of_block(local: Tensor, full: Tensor) -> Place | None:
    """Where a block is that is shorter along several dims: there where its first element is."""
    corner = local[(0,) * local.ndim]
    for position in (full == corner).nonzero()[:MOST_BLOCKS]:
        block = full
        indices = []
        for dim, first in enumerate(position.tolist()):
            last = min(first + local.shape[dim], full.shape[dim])
            index = torch.arange(first, last)
            block = block.index_select(dim, index)
            indices.append(index)
        if torch.equal(block, local):
            return Place(tuple(indices))
    return None


def reduced(tensors: Sequence[LocalTensor | None], rank: int, dims: int | None = None) -> Tensor | None:
    """A rank's tensor; of a DTensor that is partial, what its reduction comes to. None where another rank has none.

    Args:
        dims: how many dims of the DTensor's mesh are reduced, the first ones. Default: all.
    """
    own = tensors[rank]
    if own is None:
        return None
    *earlier, last = own.partial[:dims] or (None,)
    if last is None:
        return own.local
    parts = [reduced(tensors, other, len(earlier)) for other in last.ranks]
    if any(part is None or part.shape != own.local.shape for part in parts):
        return None
    stacked = torch.stack([part for part in parts if part is not None])
    if last.norm is not None:
        return torch.linalg.vector_norm(stacked, last.norm, 0)
    return REDUCTIONS[last.operation](stacked)


def relation(
    value: Tensor | None,
    expected: Tensor,
    scale: float,
    rank: int,
    others: Callable[[int], tuple[Tensor | None, Tensor | None]],
    alone: Tensor | None,
    subject: Subject,
) -> str:
    """What a tensor that is wrong is instead, in words.

    Args:
        scale: what differences are measured by.
        others: rank → what it has, and what it ought to have.
        alone: what the plain model has, on this rank's batch alone.
    """
    if value is None:
        return "is not there"
    if value.shape != expected.shape:
        return f"has shape {tuple(value.shape)}, and ought to have {tuple(expected.shape)}"
    if not value.is_floating_point() and not value.is_complex():
        return "has other elements"
    if torch.isfinite(expected).all() and not torch.isfinite(value).all():
        return "is not finite"
    if size_of(value) == 0:
        return "is zero"
    if value.dtype != expected.dtype:
        kind = str(value.dtype).removeprefix("torch.")
        rounded = relative(value, expected, scale) < LOW_PRECISION
        return f"is rounded to {kind}" if rounded else f"is {kind}, and differs"

    if words := _over_ranks(value, expected, scale, rank, others, subject):
        return words
    flat, ought = value.flatten(), expected.flatten()
    norm = torch.linalg.vecdot(ought, ought).real.item()
    factor = (torch.linalg.vecdot(ought, flat).real.item() / norm) if norm else math.nan
    if math.isfinite(factor) and factor:
        # Of what is nearly right, every number near 1 would do: the factor has to explain what is left.
        near = min(ALIKE, relative(value, expected, size_of(value)) / 10)
        if relative(value, expected * factor, size_of(value)) <= near:
            return f"{times(factor, subject)} what it should be"
    if alone is not None and alone.shape == value.shape and relative(value, alone, size_of(alone)) <= ALIKE:
        return "what this rank has by itself, without the others: its own samples or positions, from 0"
    for other in range(len(subject.places)):
        theirs = others(other)[1]
        if other == rank or theirs is None or theirs.shape != value.shape:
            continue
        if relative(value, theirs, size_of(theirs)) <= ALIKE:
            return f"rank {other}'s part"
    return "differs"


def _over_ranks(
    value: Tensor,
    expected: Tensor,
    scale: float,
    rank: int,
    others: Callable[[int], tuple[Tensor | None, Tensor | None]],
    subject: Subject,
) -> str:
    """Whether what the ranks of an axis have comes to what it should be together. Arguments as of `relation`."""
    for axis, size in subject.axes.items():
        if size == 1:
            continue
        group = [one for one in (others(other)[0] for other in subject.group(rank, axis)) if one is not None]
        if len(group) < size or any(one.shape != value.shape for one in group):
            continue
        stacked = torch.stack(group)
        if size_of(stacked - stacked[0]) <= ALIKE * scale:
            continue  # all have the same
        if relative(stacked.sum(0), expected, scale) <= ALIKE:
            return f"partial over {axis}: the ranks' tensors add up to it, and nothing has added them up"
        if relative(stacked.mean(0), expected, scale) <= ALIKE:
            return f"each rank of {axis} has its own: their mean is right, and nothing has taken it"
    return ""


def times(factor: float, subject: Subject) -> str:
    """``2 times (the size of dp)``."""
    sizes = {**subject.axes, "the mesh": len(subject.places)}
    for axis, size in sizes.items():
        if size > 1 and math.isclose(factor, size, rel_tol=1e-6):
            return f"{size} times (the size of {axis})"
        if size > 1 and math.isclose(factor, 1 / size, rel_tol=1e-6):
            return f"1/{size} (of the size of {axis}) times"
    return f"{with_digits(factor)} times"


def with_digits(factor: float) -> str:
    """A factor with so many digits that it is not shown as 1."""
    rounded = f"{factor:.6g}"
    if rounded != "1" or factor == 1:
        return rounded
    decimals = 3 - math.floor(math.log10(abs(factor - 1)))
    return f"{factor:.{min(decimals, 15)}f}"
