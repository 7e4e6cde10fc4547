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
    """Seconds of each row.

    Attributes:
        name: the column, or columns, that say it.
        dt: of the step on the rank where it took longest, (draw,): others may wait once it is over.
        rank: that had the most, (draw,); NaN where that is not known.
        over: what that rank had over the median rank, or of two over the other, (draw,).
        ranks: of the run.
        by_rank: (draw, rank); None where the record has min, median and max alone.
    """

    name: str
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
    if ds.sizes.get("rank", 1) < 2 or not ds.sizes["draw"]:
        return None
    if all(name in ds and ds[name].ndim == 2 for name in ("dt", OWN)):
        return _by_rank(OWN, ds["dt"].values, ds[OWN].values)
    if all(f"{name}_{over}" in ds for name, over in ((OWN, "max"), (OWN, "median"), (OWN, "argmax"), ("dt", "max"))):
        over = ds[f"{OWN}_max"].values - ds[f"{OWN}_median"].values
        return OwnWork(OWN, ds["dt_max"].values, known_ranks(ds[f"{OWN}_argmax"].values), over, ds.sizes["rank"])
    return None


def _by_rank(name: str, dt: np.ndarray, own: np.ndarray) -> OwnWork | None:
    rank, over = most_of(own)
    return OwnWork(name, longest(dt), rank, over, own.shape[1], own) if np.isfinite(rank).any() else None


def known_ranks(column: np.ndarray) -> np.ndarray:
    """Of a column of ranks those that are numbers of ranks, else NaN."""
    column = column.astype(np.float64)
    return np.where((column >= 0) & (column < MOST_RANKS), column, np.nan)


def most_of(by_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(draw, rank) → `OwnWork.rank` and `OwnWork.over`."""
    finite = np.where(np.isfinite(by_rank), by_rank, np.nan)
    rank, over = np.full((2, len(finite)), np.nan)
    known = np.isfinite(finite).any(axis=1)
    if known.any():
        rank[known] = np.nanargmax(finite[known], axis=1)
        over[known] = np.nanmax(finite[known], axis=1) - median_rank(finite[known])
    return rank, over


def longest(by_rank: np.ndarray) -> np.ndarray:
    """(draw, rank) → (draw,): the largest; NaN where no rank gave a number."""
    finite = np.where(np.isfinite(by_rank), by_rank, -np.inf).max(axis=1)
    return np.where(np.isfinite(finite), finite, np.nan)


def median_rank(by_rank: np.ndarray) -> np.ndarray:
    """(draw, rank) → (draw,): what the median rank had, of an even number the lower of the two; NaN where none did."""
    finite = np.where(np.isfinite(by_rank), by_rank, np.nan).astype(np.float64)
    count = np.isfinite(finite).sum(axis=1)
    middle = np.maximum((count - 1) // 2, 0)
    return np.take_along_axis(np.sort(finite, axis=1), middle[:, None], axis=1)[:, 0]  # NaN stands last


def slow(work: OwnWork) -> Slow | None:
    """The rank with the most in more than half of the rows, if it holds the others up by more than `SLOW` of a step.
    The first row, which starts what is slow to start, counts only if it is alone.

    Chance alone gives each of n ranks the most in 1/n of the rows: the half is of the rows beyond those, so that of two
    equal ones none is named.
    """
    begin = 1 if len(work.dt) > 1 else 0
    rank, over, dt = (column[begin:] for column in (work.rank, work.over, work.dt))
    known = np.isfinite(rank) & np.isfinite(over) & np.isfinite(dt)
    rank, over, dt = rank[known], over[known], dt[known]
    if not len(rank):
        return None
    ranks, rows = np.unique(rank, return_counts=True)
    had = rank == ranks[rows.argmax()]
    by_chance = 1 / work.ranks
    found = Slow(int(rank[had][0]), float(np.median(over[had])), float(np.median(dt)), int(had.sum()), len(rank))
    return found if had.mean() > (1 + by_chance) / 2 and found.over > SLOW * found.step else None


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
    if ds.sizes.get("rank", 1) < 2:
        return None
    for suffix in ("", "_median"):
        if f"dt{suffix}" in ds and f"{OWN}{suffix}" in ds:
            dt, own = (ds[f"{name}{suffix}"].values.reshape(ds.sizes["draw"], -1) for name in ("dt", OWN))
            ratio = communication_to_computation(dt, own)
            return None if ratio is None else f"{ratio:.3f} s for other ranks, for each second of computation"
    return None
