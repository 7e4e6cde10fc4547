"""A rank's own work in a step, and which rank the others wait for.

Each rank of a synchronous step takes as long as the slowest: the others wait for it inside collectives, and ``dt`` is
equal on all. What is left of ``dt`` without that waiting, ``dt_own``, tells them apart (`mmm.runtime.clock`). Over all
ranks, what they waited is the ratio of communication to computation, as it was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmm.history.record.folder import OWN

if TYPE_CHECKING:
    import xarray

NOT_KNOWN = "not known: each rank's dt contains its waiting for the others, which was not timed"
MOST_RANKS = 2**31  # a damaged record may have any number
SLOW = 0.05  # of a step's time, by which a rank holds the others up


class OwnWork(NamedTuple):
    """Seconds of each row, without waiting (``dt_own``).

    Attributes:
        dt: of the step on the rank where it took longest, (draw,): others may wait once it is over.
        rank: that had the most, (draw,); NaN where that is not known.
        over: what that rank had over the median rank, or of two over the other, (draw,).
        ranks: of the run.
        by_rank: (draw, rank); None where the record has min, median and max alone.
    """

    dt: np.ndarray
    rank: np.ndarray
    over: np.ndarray
    ranks: int
    by_rank: np.ndarray | None = None


class Slow(NamedTuple):
    """The rank that the others wait for.

    Attributes:
        over: seconds of a step over the median rank, the median over `rows`.
        step: seconds of a step.
        rows: in which it had the most, of `of`.
    """

    rank: int
    over: float
    step: float
    rows: int
    of: int


def own_work(ds: xarray.Dataset) -> OwnWork | None:
    """Of a record; None where it was not timed, or there is one rank."""
    ranks = ds.sizes.get("rank", 1)
    if ranks < 2 or not ds.sizes["draw"]:
        return None
    if all(name in ds and ds[name].ndim == 2 for name in ("dt", OWN)):
        own = ds[OWN].values
        rank, over = most_of(own)
        return None if np.isnan(rank).all() else OwnWork(ds["dt"].values.max(axis=1), rank, over, ranks, own)
    if all(name in ds for name in (f"{OWN}_max", f"{OWN}_median", f"{OWN}_argmax", "dt_max")):
        over = ds[f"{OWN}_max"].values - ds[f"{OWN}_median"].values
        rank = ds[f"{OWN}_argmax"].values.astype(np.float64)
        rank[~((rank >= 0) & (rank < MOST_RANKS))] = np.nan
        return OwnWork(ds["dt_max"].values, rank, over, ranks)
    return None


def most_of(by_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(draw, rank) → `OwnWork.rank` and `OwnWork.over`."""
    known = np.isfinite(by_rank).any(axis=1)
    finite = np.where(np.isfinite(by_rank), by_rank, np.nan)[known]
    rank, over = np.full((2, len(by_rank)), np.nan)
    if known.any():
        rank[known] = np.nanargmax(finite, axis=1)
        # Of an even number of ranks the lower of the two in the middle.
        over[known] = np.nanmax(finite, axis=1) - np.nanquantile(finite, 0.5, axis=1, method="lower")
    return rank, over


def slow(work: OwnWork) -> Slow | None:
    """The rank with the most in more than half of the rows, if it holds the others up by more than `SLOW` of a step.
    The first row, which starts what is slow to start, counts only if it is alone.

    Chance alone gives each of n ranks the most in 1/n of the rows: the half is of the rows beyond those, so that of two
    equal ones none is named.
    """
    rows = np.stack((work.rank, work.over, work.dt))  # (3, draw)
    if len(work.dt) > 1:
        rows = rows[:, 1:]
    rank, over, dt = rows[:, np.isfinite(rows).all(axis=0)]
    if not len(rank):
        return None
    ranks, counts = np.unique(rank, return_counts=True)
    slowest = ranks[counts.argmax()]
    held_up = float(np.median(over[rank == slowest]))
    step = float(np.median(dt))
    by_chance = 1 / work.ranks
    if counts.max() / len(rank) <= (1 + by_chance) / 2 or held_up <= SLOW * step:
        return None
    return Slow(int(slowest), held_up, step, int(counts.max()), len(rank))


def communication_to_computation(dt: np.ndarray, own: np.ndarray) -> float | None:
    """Seconds in which ranks waited for others, for each second in which they did not; over all ranks, and all rows but
    the first, which starts what is slow to start.

    What a rank waits for is communication that nothing hides and ranks that are slower; what computation hides is not
    in it. None where it is not known (`mmm.runtime.clock.timed_waits`).

    Args:
        dt: seconds of a step, (rows, ranks). own: ``dt_own`` of the same steps.
    """
    both = np.isfinite(dt) & np.isfinite(own)
    both[:1] &= len(dt) == 1
    computed = own[both].sum()
    return float((dt[both] - own[both]).sum() / computed) if computed > 0 else None


def waiting_text(ds: xarray.Dataset) -> str | None:
    """`communication_to_computation` of a record, in words; of more than `full_ranks` ranks by their medians."""
    suffix = "" if OWN in ds else "_median"
    names = [f"dt{suffix}", f"{OWN}{suffix}"]
    if ds.sizes.get("rank", 1) < 2 or not all(name in ds for name in names):
        return None
    dt, own = (ds[name].values.reshape(ds.sizes["draw"], -1) for name in names)
    ratio = communication_to_computation(dt, own)
    return None if ratio is None else f"{ratio:.3f} s for other ranks, for each second of computation"
