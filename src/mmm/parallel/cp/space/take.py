"""Move rows of a field between ranks: each rank takes the rows that it wants, from whichever rank has them.

::

    have   [ 0 1 2 3 | 4 5 6 7 | 8 9 … ]       forward   take: the wanted rows come
    want   [ -1 … 4 ][ 3 … 8 ] …               backward  give back: their gradients go home, and are added up

Row -1 lies outside of the field: it is zero, or row N - 1 (circular), 1 (reflect) or 0 (replicate). A halo is a take,
for any kernel, stride, dilation and padding, however few rows a rank has. So are the roll of shifted windows, the
keys and values of attention, and a change of the strips.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.parallel.cp.space.strips import Bounds

# In place of a rank: of a row that is no row of the field.
OUTSIDE = -1


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

    @property
    def next_place(self) -> tuple[int, int]:
        """The row after the last one: its rank, and its place there."""
        return self.source, self.first + self.length


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
    # Of each row of the field: the rank that has it, and its place there.
    places: list[tuple[int, int]] = []
    for rank, (first, end) in enumerate(have):
        places.extend((rank, row) for row in range(end - first))
    by_rank = []
    for first, end in want:
        runs: list[Run] = []
        for wanted in range(first, end):
            row = row_inside(wanted, length, outside)
            # Rows outside belong together as they are counted.
            place = (OUTSIDE, wanted)
            if 0 <= row < length:
                place = places[row]
            if not runs or runs[-1].next_place != place:
                runs.append(Run(*place, 0))
            run = runs.pop()
            runs.append(run._replace(length=run.length + 1))
        by_rank.append(tuple(runs))
    return tuple(by_rank)


def crosses(route: Route) -> bool:
    """Whether any rank wants a row of another one. All ranks agree on it."""
    for rank, runs in enumerate(route):
        sources = {run.source for run in runs}
        if sources - {rank, OUTSIDE}:
            return True
    return False


def traffic(route: Route, rank: int) -> tuple[list[list[Run]], list[list[Run]]]:
    """The runs that each other rank takes from `rank`, and those that `rank` takes from each."""
    lent: list[list[Run]] = [[] for _ in route]
    taken: list[list[Run]] = [[] for _ in route]
    for other, runs in enumerate(route):
        if other != rank:
            lent[other] = [run for run in runs if run.source == rank]
            taken[other] = [run for run in route[rank] if run.source == other]
    return lent, taken


def with_length(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of x with another length of `dim`."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def lengths_of(runs: Iterable[Run]) -> list[int]:
    return [run.length for run in runs]


def exchange(
    pieces: Sequence[Tensor],
    dim: int,
    sent: list[list[Run]],
    received: list[list[Run]],
    like: Tensor,
    group: Any,
) -> Sequence[Tensor]:
    """Send rows to each rank of a group, and return those that come. A collective of the group.

    Args:
        pieces: the rows of the runs `sent`, in their order.
        sent: the runs that go to each rank.
        received: the runs that come from each rank.
        like: a tensor of their dtype, on their device, and of their shape but for `dim`.

    Returns:
        The rows of the runs `received`, in their order.
    """
    # A rank may send nothing.
    none = like.new_empty(with_length(like, dim, 0))
    # (rows, …): the collective splits the first dim.
    outgoing = torch.cat([none, *pieces], dim).movedim(dim, 0).contiguous()
    rows_sent = [sum(lengths_of(runs)) for runs in sent]
    rows_received = [sum(lengths_of(runs)) for runs in received]
    incoming = outgoing.new_empty(sum(rows_received), *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing, rows_received, rows_sent, group=group)
    return incoming.movedim(0, dim).split(lengths_of(chain(*received)), dim)


class _Take(torch.autograd.Function):
    """The rows of a route, in its order. Backward: `_GiveBack`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        dim: int,
        route: Route,
        rank: int,
        group: Any,
        fill: float,
    ) -> Tensor:
        ctx.arguments = (dim, route, rank, group)
        ctx.length = x.shape[dim]
        arrived: dict[Run, Tensor] = {}
        if crosses(route):
            lent, taken = traffic(route, rank)
            pieces = [x.narrow(dim, run.first, run.length) for run in chain(*lent)]
            tensors = exchange(pieces, dim, lent, taken, x, group)
            # A run that is wanted twice comes twice, with the same rows.
            arrived = dict(zip(chain(*taken), tensors, strict=True))
        # A rank may want no rows.
        rows = [x.new_empty(with_length(x, dim, 0))]
        for run in route[rank]:
            if run.source == OUTSIDE:
                rows.append(x.new_full(with_length(x, dim, run.length), fill))
            elif run.source == rank:
                rows.append(x.narrow(dim, run.first, run.length))
            else:
                rows.append(arrived[run])
        return torch.cat(rows, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        home = _GiveBack.apply(gradient, *ctx.arguments, ctx.length)
        return home, None, None, None, None, None


class _GiveBack(torch.autograd.Function):
    """The gradients of rows that were taken go to the ranks that have the rows, and are added up. Backward: `_Take`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        gradient: Tensor,
        dim: int,
        route: Route,
        rank: int,
        group: Any,
        length: int,
    ) -> Tensor:
        ctx.arguments = (dim, route, rank, group)
        home = gradient.new_zeros(with_length(gradient, dim, length))
        # By the rank that they go to.
        pieces: list[list[Tensor]] = [[] for _ in route]
        rows = gradient.split(lengths_of(route[rank]), dim)
        for run, piece in zip(route[rank], rows, strict=True):
            # What stays on this rank is added first, then what other ranks give back.
            if run.source == rank:
                home.narrow(dim, run.first, run.length).add_(piece)
            elif run.source != OUTSIDE:
                pieces[run.source].append(piece)
        if crosses(route):
            lent, taken = traffic(route, rank)
            # What was taken goes, and what was lent comes.
            tensors = exchange(list(chain(*pieces)), dim, taken, lent, gradient, group)
            for run, tensor in zip(chain(*lent), tensors, strict=True):
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
