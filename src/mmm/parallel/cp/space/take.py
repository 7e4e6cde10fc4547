"""Move rows of a field between ranks: each rank takes the rows that it wants, from whichever rank has them.

::

    have   [ 0 1 2 3 | 4 5 6 7 | 8 9 … ]       forward   take: the wanted rows come
    want   [ -1 … 4 ][ 3 … 8 ] …               backward  give back: their gradients go home, and are added up

Row -1 lies outside of the field: it is zero, or row N - 1 (circular), 1 (reflect) or 0 (replicate). A halo is a take,
for any kernel, stride, dilation and padding, however few rows a rank has. So are the roll of shifted windows, the
keys and values of attention, and a change of the strips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.parallel.cp.space.strips import Bounds

# In place of a rank: of a row that is no row of the field.
OUTSIDE = -1
# Pieces of a tensor for each rank of a group, or from each.
Pieces = list[list[Tensor]]


class Run(NamedTuple):
    """Consecutive rows that come from one rank.

    Attributes:
        source: rank of the group that has them, or `OUTSIDE`.
        first: number of the first, counted from that rank's first row.
        length: number of rows.
    """

    source: int
    first: int
    length: int


# For each rank the runs that make up what it wants, in order.
Route = tuple[tuple[Run, ...], ...]


def row_inside(row: int, length: int, outside: str | int) -> int:
    """Return the row of the field that stands for `row`, which may lie outside. If none does, `row` itself.

    Args:
        outside: zeros, circular, reflect or replicate. A number: circular after so many rows, of which those that the
            field lacks are filled.
    """
    if outside == "circular":
        return row % length
    if isinstance(outside, int):
        return row % outside
    last = length - 1
    if outside == "reflect":
        return last - abs(last - abs(row))
    if outside == "replicate":
        return min(max(row, 0), last)
    return row


@lru_cache(maxsize=4096)
def routes(have: Bounds, want: Bounds, outside: str | int) -> Route:
    """Where the rows that each rank wants come from.

    Args:
        outside: as for `row_inside`.
    """
    length = have[-1][1]
    # Of each row of the field, the rank that has it.
    sources = [rank for rank, (first, end) in enumerate(have) for _ in range(first, end)]
    by_rank = []
    for first, end in want:
        rows = []
        for wanted in range(first, end):
            row = row_inside(wanted, length, outside)
            is_inside = 0 <= row < length
            # Rows outside belong together as they are counted.
            rows.append((sources[row], row) if is_inside else (OUTSIDE, wanted))
        runs = []
        # Where rows follow each other, they and their places in the list differ by the same number.
        for _, group in groupby(enumerate(rows), lambda item: (item[1][0], item[1][1] - item[0])):
            places = [place for place, _ in group]
            source, row = rows[places[0]]
            if source != OUTSIDE:
                row -= have[source][0]
            runs.append(Run(source, row, len(places)))
        by_rank.append(tuple(runs))
    return tuple(by_rank)


def crosses(route: Route) -> bool:
    """Whether any rank wants a row of another one. All ranks agree on it."""
    taken = [(rank, run.source) for rank, runs in enumerate(route) for run in runs]
    return any(source not in (OUTSIDE, rank) for rank, source in taken)


def runs_between(route: Route, source: int, rank: int) -> list[Run]:
    """The runs that `rank` takes from another rank, `source`."""
    if source == rank:
        return []
    return [run for run in route[rank] if run.source == source]


def with_length(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of x with another length of `dim`."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def all_to_all(
    pieces: Pieces,
    shapes: Sequence[Sequence[Sequence[int]]],
    like: Tensor,
    group: Any,
) -> Pieces:
    """Send ``pieces[rank]`` to each rank of a group, and return what each has sent. A collective of the group.

    Args:
        shapes: for each rank the shapes of the tensors that it sends.
        like: a tensor of their dtype, on their device.
    """
    # One message for each rank, however many pieces it gets.
    flat = [piece.reshape(-1) for to_rank in pieces for piece in to_rank]
    outgoing = torch.cat([like.new_empty(0), *flat])
    send = [sum(piece.numel() for piece in to_rank) for to_rank in pieces]
    counts = [[prod(shape) for shape in from_rank] for from_rank in shapes]
    receive = [sum(of_rank) for of_rank in counts]
    incoming = like.new_empty(sum(receive))
    dist.all_to_all_single(incoming, outgoing, receive, send, group=group)
    received = []
    for from_rank, of_rank, shapes_of_rank in zip(incoming.split(receive), counts, shapes, strict=True):
        tensors = from_rank.split(of_rank)
        received.append([tensor.view(*shape) for tensor, shape in zip(tensors, shapes_of_rank, strict=True)])
    return received


class _Take(torch.autograd.Function):
    """The rows of a route, in its order. Backward: `_GiveBack`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, dim: int, route: Route, rank: int, group: Any, fill: float
    ) -> Tensor:
        ctx.arguments = (dim, route, rank, group)
        ctx.length = x.shape[dim]
        ranks = range(len(route))
        arrived: list[Iterator[Tensor]] = []
        if crosses(route):
            pieces = [[x.narrow(dim, run.first, run.length) for run in runs_between(route, rank, r)] for r in ranks]
            shapes = [[with_length(x, dim, run.length) for run in runs_between(route, r, rank)] for r in ranks]
            arrived = [iter(tensors) for tensors in all_to_all(pieces, shapes, x, group)]
        # A rank may want no rows.
        rows = [x.new_empty(with_length(x, dim, 0))]
        for run in route[rank]:
            if run.source == OUTSIDE:
                rows.append(x.new_full(with_length(x, dim, run.length), fill))
            elif run.source == rank:
                rows.append(x.narrow(dim, run.first, run.length))
            else:
                rows.append(next(arrived[run.source]))
        return torch.cat(rows, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        home = _GiveBack.apply(gradient, *ctx.arguments, ctx.length)
        return home, None, None, None, None, None


class _GiveBack(torch.autograd.Function):
    """The gradients of rows that were taken go to the ranks that have the rows, and are added up. Backward: `_Take`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, gradient: Tensor, dim: int, route: Route, rank: int, group: Any, length: int
    ) -> Tensor:
        ctx.arguments = (dim, route, rank, group)
        # What stays on this rank is added first, then what other ranks give back.
        home = gradient.new_zeros(with_length(gradient, dim, length))
        pieces: Pieces = [[] for _ in route]
        place = 0
        for run in route[rank]:
            piece = gradient.narrow(dim, place, run.length)
            place += run.length
            if run.source == rank:
                home.narrow(dim, run.first, run.length).add_(piece)
            elif run.source != OUTSIDE:
                pieces[run.source].append(piece)
        if not crosses(route):
            return home
        # What each rank took from this one.
        taken = [runs_between(route, rank, r) for r in range(len(route))]
        shapes = [[with_length(gradient, dim, run.length) for run in runs] for runs in taken]
        received = all_to_all(pieces, shapes, gradient, group)
        for runs, tensors in zip(taken, received, strict=True):
            for run, tensor in zip(runs, tensors, strict=True):
                home.narrow(dim, run.first, run.length).add_(tensor)
        return home

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # Rows outside of the field have no gradient to pass on.
        rows = _Take.apply(gradient, *ctx.arguments, 0.0)
        return rows, None, None, None, None, None


class Axis(NamedTuple):
    """One dim of a tensor, and how it lies over ranks.

    Attributes:
        dim: the dim.
        have: the rows of each rank. Of a dim that is not split, all rows of the only one.
        rank: this rank, in the group.
        group: the ranks; None if the dim is not split.
    """

    dim: int
    have: Bounds
    rank: int = 0
    group: Any = None

    @property
    def length(self) -> int:
        """Number of rows of the full field."""
        return self.have[-1][1]

    def own(self, full: Tensor, dim: int) -> Tensor:
        """This rank's rows of a full field, along `dim`. A view."""
        first, end = self.have[self.rank]
        return full.narrow(dim, first, end - first)

    def take(self, x: Tensor, want: Bounds, outside: str | int = "zeros", fill: float = 0.0) -> Tensor:
        """Return the rows of a field that this rank wants. A collective of the group, if any rank wants another's.

        Args:
            x: this rank's rows, ``have[rank]``.
            want: the rows that each rank wants.
            outside: what rows outside of the field are, as for `row_inside`.
            fill: value of those that are no row of it.
        """
        if want == self.have:
            return x
        route = routes(self.have, want, outside)
        # One node of the graph, the same on every rank: so all ranks come to the collectives of backward in one order.
        return _Take.apply(x, self.dim, route, self.rank, self.group, fill)  # type: ignore[no-any-return]
