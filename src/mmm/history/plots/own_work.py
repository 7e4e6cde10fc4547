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
# Fraction of a step's time by which a rank has to hold up the others to be called slow.
SLOW = 0.05


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


def after_warm_up(ds: xarray.Dataset) -> xarray.Dataset:
    """Leave out the first row, which includes warm-up, unless it is the only one."""
    if ds.sizes["draw"] < 2:
        return ds
    return ds.isel(draw=slice(1, None))


def is_timed(ds: xarray.Dataset) -> bool:
    """Whether a record has the ranks' own work, of two ranks or more and in some row."""
    if ds.sizes.get("rank", 1) < 2:
        return False
    # Records of many ranks only have minimum, median and maximum over the ranks.
    own = f"{OWN}_max"
    dt = "dt_max"
    dims: tuple[str, ...] = ("draw",)
    if OWN in ds:
        own = OWN
        dt = "dt"
        dims = ("draw", "rank")
    for name in (dt, own):
        if name not in ds or ds[name].dims != dims:
            return False
    is_known = np.isfinite(ds[own].values)
    return bool(is_known.any())


def slow(ds: xarray.Dataset) -> Slow | None:
    """Find the rank that worked longest in more than half of the rows, if it holds up the others.

    It does so if it works longer than the median rank by more than `SLOW` of a step. By chance, each of n ranks works
    longest in 1/n of the rows. So the half is taken of the rows beyond those: then neither of two equal ranks is named.
    """
    if not is_timed(ds):
        return None
    ds = after_warm_up(ds)
    # (3, draw): the rank that worked longest, the seconds that it worked longer than the median rank, those of a step.
    rows = np.stack(_longest(ds))
    is_finite = np.isfinite(rows)
    finite = is_finite.all(axis=0)
    rank, over, dt = rows[:, finite]
    n_rows = len(rank)
    if not n_rows:
        return None
    # Each rank that worked longest in a row, and the number of such rows.
    ranks, counts = np.unique(rank, return_counts=True)
    slowest = ranks[counts.argmax()]
    most = int(counts.max())
    over_if_slowest = over[rank == slowest]
    held_up = float(np.median(over_if_slowest))
    step = float(np.median(dt))
    by_chance = 1 / ds.sizes["rank"]
    if most / n_rows <= (1 + by_chance) / 2:
        return None
    if held_up <= SLOW * step:
        return None
    return Slow(
        rank=int(slowest),
        over=held_up,
        step=step,
        rows=most,
        of=n_rows,
    )


def _longest(ds: xarray.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rank that worked longest in each row, how much longer than the median rank, and the step's time: (draw,)."""
    if OWN not in ds:
        rank = ds[f"{OWN}_argmax"].values.astype(np.float64)
        # A damaged record may have any number as a rank.
        is_rank = (rank >= 0) & (rank < ds.sizes["rank"])
        rank[~is_rank] = np.nan
        most = ds[f"{OWN}_max"].values
        median = ds[f"{OWN}_median"].values
        return rank, most - median, ds["dt_max"].values
    # (draw, rank)
    own = ds[OWN].values.copy()
    is_finite = np.isfinite(own)
    own[~is_finite] = np.nan
    # Rows without a number stay NaN: NumPy raises or warns for them.
    known = is_finite.any(axis=1)
    rank = np.full(len(own), np.nan)
    over = np.full(len(own), np.nan)
    if known.any():
        rows = own[known]
        rank[known] = np.nanargmax(rows, axis=1)
        most = np.nanmax(rows, axis=1)
        # With an even number of ranks, the lower of the two in the middle.
        median = np.nanquantile(rows, 0.5, axis=1, method="lower")
        over[known] = most - median
    # The others may wait after their step is over.
    dt = ds["dt"].values.max(axis=1)
    return rank, over, dt


def communication_to_computation(ds: xarray.Dataset) -> float | None:
    """Divide the seconds in which ranks waited for others by the seconds in which they did not, over all ranks and
    rows. None if the waiting is not known (`mmm.runtime.waits.timed_waits`).

    What a rank waits for is communication that nothing hides, and slower ranks; communication that computation hides
    does not count.
    """
    if not is_timed(ds):
        return None
    ds = after_warm_up(ds)
    # Records of many ranks only have medians over the ranks.
    suffix = "_median"
    if OWN in ds:
        suffix = ""
    dt = ds[f"dt{suffix}"].values
    own = ds[f"{OWN}{suffix}"].values
    both = np.isfinite(dt) & np.isfinite(own)
    computed = own[both].sum()
    if not computed > 0:
        return None
    waited = dt[both].sum() - computed
    return float(waited / computed)


def waiting_text(ds: xarray.Dataset) -> str:
    """Write a run's `communication_to_computation`, to stand after "for other ranks: "; empty if it is not known."""
    ratio = communication_to_computation(ds)
    if ratio is None:
        return ""
    return f"{ratio:.3f} s per second of computation"
