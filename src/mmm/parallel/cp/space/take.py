"""Move rows of a field between ranks: each rank takes the rows that it wants, from whichever rank has them.

::

    have   [ 0 1 2 3 | 4 5 6 7 | 8 9 … ]       forward   take: the wanted rows come
    want   [ -1 … 4 ][ 3 … 8 ] …               backward  the same way back: their gradients go home, and are added up

Row -1 lies outside of the field: it is zero, or row N - 1 (circular), 1 (reflect) or 0 (replicate). A halo is a take,
for any kernel, stride, dilation and padding, however few rows a rank has. So are the roll of shifted windows, the
keys and values of attention, and a change of the strips.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.parallel.cp.space.strips import Bounds

# In place of a rank: of a row that is no row of the field.
OUTSIDE = -1


class Move(NamedTuple):
    """Consecutive rows that one rank takes from one rank.

    Attributes:
        source: the rank of the group that has them, or `OUTSIDE`.
        first: number of the first row, counted from that rank's first one.
        target: the rank that takes them.
        place: where it puts the first one, counted from the first row that it takes.
        length: number of rows.
    """

    source: int
    first: int
    target: int
    place: int
    length: int

    @property
    def back(self) -> Move:
        """The way of the gradients."""
        return Move(self.target, self.place, self.source, self.first, self.length)


# What all ranks take.
Route = tuple[Move, ...]


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
def route_of(have: Bounds, want: Bounds, outside: str | int) -> Route:
    """How the rows that each rank wants get there. All ranks compute the same.

    Args:
        outside: as for `row_inside`.
    """
    length = have[-1][1]
    # Of each row of the field: the rank that has it, and its place there.
    homes = {}
    for rank, (first, end) in enumerate(have):
        for place, row in enumerate(range(first, end)):
            homes[row] = (rank, place)
    route = []
    for target, (first, end) in enumerate(want):
        # The rank that has a row, and its place there, less its place here: the same for rows that move together.
        offsets = []
        for place, wanted in enumerate(range(first, end)):
            row = row_inside(wanted, length, outside)
            source, row_there = homes.get(row, (OUTSIDE, place))
            offsets.append((source, row_there - place))
        place = 0
        for (source, offset), together in groupby(offsets):
            rows = len(list(together))
            route.append(Move(source, place + offset, target, place, rows))
            place += rows
    return tuple(route)


def with_length(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of x with another length of `dim`."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


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
        first, end = want[self.rank]
        return self.move(x, route_of(self.have, want, outside), end - first, fill)

    def move(self, x: Tensor, route: Route, length: int, fill: float = 0.0) -> Tensor:
        """`take`, on a route.

        Args:
            length: number of rows that this rank takes.
        """
        # One node of the graph, the same on every rank: so all ranks come to the collectives of backward in one order.
        return _Move.apply(x, self, route, length, fill)  # type: ignore[no-any-return]


class _Move(torch.autograd.Function):
    """The rows that this rank takes on a route. Backward is the same, on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, route: Route, length: int, fill: float) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        ctx.route = route
        ctx.length = x.shape[axis.dim]
        return _moved(x, axis, route, length, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # Rows outside of the field have no gradient to pass on.
        way_back = tuple(move.back for move in ctx.route if move.source != OUTSIDE)
        home = ctx.axis.move(gradient, way_back, ctx.length)
        return home, None, None, None, None


def _moved(x: Tensor, axis: Axis, route: Route, length: int, fill: float) -> Tensor:
    """The sum of what comes to each of the rows that this rank takes. A collective, if any move is between two ranks.

    Args:
        x: this rank's rows.
        length: number of rows that it takes.
        fill: value of rows outside of the field.
    """
    y = x.new_zeros(with_length(x, axis.dim, length))
    # (rows, …): views.
    have = x.movedim(axis.dim, 0)
    taken = y.movedim(axis.dim, 0)
    sent = []
    received = []
    for move in route:
        if move.target != axis.rank:
            if move.source == axis.rank:
                sent.append(move)
            continue
        place = taken.narrow(0, move.place, move.length)
        if move.source == OUTSIDE:
            place.fill_(fill)
        elif move.source == axis.rank:
            place.add_(have.narrow(0, move.first, move.length))
        else:
            received.append((move.source, place))
    # All ranks agree on it.
    if all(move.source in (move.target, OUTSIDE) for move in route):
        return y
    # The collective has them by rank.
    sent.sort(key=attrgetter("target"))
    received.sort(key=itemgetter(0))
    pieces = [have.narrow(0, move.first, move.length) for move in sent]
    # A rank may send nothing.
    outgoing = torch.cat([have.narrow(0, 0, 0), *pieces]).contiguous()
    rows_sent = [0] * len(axis.have)
    rows_received = [0] * len(axis.have)
    for move in sent:
        rows_sent[move.target] += move.length
    for source, place in received:
        rows_received[source] += len(place)
    incoming = outgoing.new_empty(with_length(outgoing, 0, sum(rows_received)))
    dist.all_to_all_single(incoming, outgoing, rows_received, rows_sent, group=axis.group)
    pieces = incoming.split([len(place) for _, place in received])
    for (_, place), piece in zip(received, pieces, strict=True):
        place.add_(piece)
    return y
