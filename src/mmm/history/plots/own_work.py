"""Finds out how much a rank works by itself in a step, and which rank the others wait for.

Each rank of a synchronous step takes as long as the slowest: the others wait for it inside collectives, and ``dt`` is
equal on all. What is left of ``dt`` without that waiting, ``dt_own``, tells the ranks apart (`mmm.runtime.clock`). The
sum of the waiting over all ranks gives the ratio of communication to computation, as it was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmm.history.record.folder import OWN

if TYPE_CHECKING:
    import xarray

NOT_KNOWN = "not known: a run with --own_work times how long each rank waits for the others"
# A damaged record may have any number as a rank.
MOST_RANKS = 2**31

# Fraction of a step's time by which a rank has to hold up the others to be called slow.
SLOW = 0.05


class OwnWork(NamedTuple):
    """Seconds that ranks have worked in each row, without waiting (``dt_own``).

    Attributes:
        dt: seconds of a step on the rank where it took longest, (draw,): the others may wait after their step is over.
        rank: the rank that worked longest, (draw,); NaN if that is not known.
        over: seconds that this rank worked longer than the median rank, or of two ranks than the other, (draw,).
        ranks: number of ranks of the run.
        by_rank: seconds of each rank's work, (draw, rank); None if the record only has min, median and max.
    """

    dt: np.ndarray
    rank: np.ndarray
    over: np.ndarray
    ranks: int
    by_rank: np.ndarray | None = None


class Slow(NamedTuple):
    """The rank that the others wait for.

    Attributes:
        rank: number of the rank.
        over: seconds of a step that it works longer than the median rank, as the median over `rows`.
        step: seconds of a step.
        rows: number of rows in which it worked longest.
        of: number of rows that were compared.
    """

    rank: int
    over: float
    step: float
    rows: int
    of: int


def own_work(ds: xarray.Dataset) -> OwnWork | None:
    """Read the ranks' own work from a run's dataset; None if it was not timed, or if there is only one rank."""
    ranks = ds.sizes.get("rank", 1)
    if ranks < 2 or not ds.sizes["draw"]:
        return None
    if all(name in ds and ds[name].ndim == 2 for name in ("dt", OWN)):
        # (draw, rank)
        own = ds[OWN].values
        rank, over = most_of(own)
        if np.isnan(rank).all():
            return None
        slowest_dt = ds["dt"].values.max(axis=1)
        return OwnWork(slowest_dt, rank, over, ranks, own)
    # Records of many ranks only have minimum, median and maximum over the ranks.
    names = (f"{OWN}_max", f"{OWN}_median", f"{OWN}_argmax", "dt_max")
    if all(name in ds for name in names):
        over = ds[f"{OWN}_max"].values - ds[f"{OWN}_median"].values
        rank = ds[f"{OWN}_argmax"].values.astype(np.float64)
        is_rank = (rank >= 0) & (rank < MOST_RANKS)
        rank[~is_rank] = np.nan
        return OwnWork(ds["dt_max"].values, rank, over, ranks)
    return None


def most_of(by_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the rank that worked longest in each row, and how much longer than the median rank.

    Args:
        by_rank: seconds of each rank's work, (draw, rank).

    Returns:
        `OwnWork.rank` and `OwnWork.over`, (draw,) each.
    """
    # Rows in which any rank has a number; NumPy raises or warns for the others.
    is_finite = np.isfinite(by_rank)
    known = is_finite.any(axis=1)
    finite = np.where(is_finite, by_rank, np.nan)[known]
    rank = np.full(len(by_rank), np.nan)
    over = np.full(len(by_rank), np.nan)
    if known.any():
        rank[known] = np.nanargmax(finite, axis=1)
        # With an even number of ranks, the lower of the two in the middle.
        median = np.nanquantile(finite, 0.5, axis=1, method="lower")
        over[known] = np.nanmax(finite, axis=1) - median
    return rank, over


def slow(work: OwnWork) -> Slow | None:
    """Find the rank that worked longest in more than half of the rows, if it holds up the others.

    It does so if it works longer than the median rank by more than `SLOW` of a step. The first row includes warm-up,
    and only counts if it is the only one. By chance, each of n ranks works longest in 1/n of the rows. So the half is
    taken of the rows beyond those: then neither of two equal ranks is named.
    """
    # (3, draw)
    rows = np.stack((work.rank, work.over, work.dt))
    if len(work.dt) > 1:
        rows = rows[:, 1:]
    finite = np.isfinite(rows).all(axis=0)
    rank, over, dt = rows[:, finite]
    n_rows = len(rank)
    if not n_rows:
        return None
    # Each rank that worked longest in a row, and the number of such rows.
    ranks, counts = np.unique(rank, return_counts=True)
    slowest = ranks[counts.argmax()]
    most = int(counts.max())
    held_up = float(np.median(over[rank == slowest]))
    step = float(np.median(dt))
    by_chance = 1 / work.ranks
    if most / n_rows <= (1 + by_chance) / 2:
        return None
    if held_up <= SLOW * step:
        return None
    return Slow(int(slowest), held_up, step, most, n_rows)


def communication_to_computation(dt: np.ndarray, own: np.ndarray) -> float | None:
    """Divide the seconds in which ranks waited for others by the seconds in which they did not, over all ranks and
    rows.

    The first row is left out, because it includes warm-up. What a rank waits for is communication that nothing hides,
    and slower ranks; communication that computation hides does not count.

    Args:
        dt: seconds of a step, (rows, ranks).
        own: ``dt_own`` of the same steps, (rows, ranks).

    Returns:
        The ratio; None if the waiting is not known (`mmm.runtime.waits.timed_waits`).
    """
    both = np.isfinite(dt) & np.isfinite(own)
    # A single row counts.
    both[:1] &= len(dt) == 1
    computed = own[both].sum()
    if not computed > 0:
        return None
    waited = (dt[both] - own[both]).sum()
    return float(waited / computed)


def waiting_text(ds: xarray.Dataset) -> str | None:
    """Write a run's `communication_to_computation` as text, to stand after "for other ranks: ".

    Returns:
        The text; None if the waiting is not known.
    """
    # Records of many ranks only have medians over the ranks.
    suffix = "" if OWN in ds else "_median"
    names = [f"dt{suffix}", f"{OWN}{suffix}"]
    is_recorded = all(name in ds for name in names)
    if ds.sizes.get("rank", 1) < 2 or not is_recorded:
        return None
    n_rows = ds.sizes["draw"]
    # (draw, rank), or (draw, 1) for the medians
    dt, own = (ds[name].values.reshape(n_rows, -1) for name in names)
    ratio = communication_to_computation(dt, own)
    if ratio is None:
        return None
    return f"{ratio:.3f} s per second of computation"
