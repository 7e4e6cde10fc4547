"""``mmm history RUN --ranks``: each rank's own work, the step minus waiting, and who holds the others up."""

from __future__ import annotations

import textwrap
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.folder import OWN
from mmm.outside import printable
from mmm.units import counted
from mmm_lab.columns import in_columns

if TYPE_CHECKING:
    import xarray

    from mmm.history.plots.own_work import OwnWork

AXIS = "axis_"  # before the name of a mesh's axis, in that of a coordinate of the dataset


def ranks_text(ds: xarray.Dataset, width: int) -> str:
    """Returns the table and the sentence. RecordError: the record does not tell own work from waiting."""
    from mmm.history.plots.own_work import NOT_KNOWN, own_work

    if ds.sizes.get("rank", 1) < 2:
        raise RecordError("--ranks: the run is of one rank, which waits for no other")
    if not ds.sizes["draw"]:
        raise RecordError("--ranks: the run has no rows yet")
    work = own_work(ds)
    if work is None:
        raise RecordError(f"--ranks: {NOT_KNOWN} (docs/trainers.md says where it is)")
    # A record of many ranks has only the smallest, the median and the largest.
    if work.by_rank is not None:
        lines = _by_rank(ds, work.by_rank, work.dt)
    else:
        lines = _over_ranks(ds)
    slowest = textwrap.fill(f"slowest: {sentence(ds, work)}", width, subsequent_indent="  ")
    return "\n".join([*lines, "", slowest])


def sentence(ds: xarray.Dataset, work: OwnWork) -> str:
    """Says who the others wait for, and how long."""
    from mmm.history.plots.own_work import SLOW, slow

    slowest = slow(work)
    if slowest is None:
        return f"no rank holds the others up by more than {100 * SLOW:.0f} % of {a_row_of(ds)}"
    # "the others wait for it" is only known of a rank that is slow in most of the rows (`own_work.slow`).
    who = f"rank {slowest.rank} ({place(ds, slowest.rank)})"
    more_work = f"{slowest.over:.3g} s more work than the median rank in {a_row_of(ds)} of {slowest.step:.3g} s"
    in_rows = f"in {slowest.rows} of {slowest.of} rows"
    return f"{who}: {more_work}, {in_rows}; the others wait for it"


def place(ds: xarray.Dataset, rank: int) -> str:
    """Says where a rank is: ``host n1, local_rank 0, tp 1``."""
    # A damaged record may name any rank.
    if not 0 <= rank < ds.sizes.get("rank", 1):
        return "place unknown"
    places = [f"{name} {values[rank]}" for name, values in _places(ds, "host", "local_rank").items()]
    return printable(", ".join(places)) or "place unknown"


def _places(ds: xarray.Dataset, *names: str) -> dict[str, np.ndarray]:
    """Returns where each rank is, (rank,): the coordinates `names`, and those on the axes along which ranks differ."""
    places = {name: ds[name].values for name in names if name in ds.coords}
    for name in sorted(map(str, ds.coords)):
        values = ds[name].values
        if name.startswith(AXIS) and len(set(values.tolist())) > 1:
            places[name.removeprefix(AXIS)] = values
    return places


def _by_rank(ds: xarray.Dataset, own_work: np.ndarray, dt: np.ndarray) -> list[str]:
    """Returns a line for each rank: the means over the rows.

    Args:
        own_work: (draw, rank) seconds. dt: (draw,) seconds.
    """
    # The first row includes warm-up.
    if len(dt) > 1:
        own_work = own_work[1:]
        dt = dt[1:]
    step = float(_mean(dt))
    places = _places(ds, "host")
    rows = [["rank", *places, "   own s", " waits"]]
    for rank, own in enumerate(_mean(own_work)):
        waits = "-"
        # A damaged record may have no times, or a rank none.
        if step > 0 and np.isfinite(own):
            waiting = max(1 - own / step, 0.0)
            waits = f"{100 * waiting:.0f} %"
        cells = [str(rank)]
        for values in places.values():
            cells.append(printable(str(values[rank])))
        cells.append(f"{own:.3g}")
        cells.append(waits)
        rows.append(cells)
    title = f"own work of each rank ({OWN}: {a_row_of(ds)} minus waiting)"
    all_columns = range(len(rows[0]))
    return [title, "", *in_columns(rows, all_columns)]


def _over_ranks(ds: xarray.Dataset) -> list[str]:
    """Returns the smallest, median and largest over the ranks, where a record has no more."""
    ranks = counted(ds.sizes["rank"], "rank")
    lines = [f"own work ({OWN}: {a_row_of(ds)} minus waiting for others), over {ranks}"]
    for name in ("min", "median", "max"):
        seconds = _mean(ds[f"{OWN}_{name}"].values)
        lines.append(f"  {name:<8}{seconds:.3g} s")
    return lines


def _mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over the rows (dim 0) that have a number. NaN where none has."""
    finite = np.isfinite(values)
    total = np.where(finite, values, 0.0).sum(axis=0)
    count = finite.sum(axis=0)
    # NumPy's nanmean warns where there is nothing to take the mean of.
    mean = np.full(np.shape(total), np.nan)
    return np.divide(total, count, out=mean, where=count > 0)


def a_row_of(names: Container[Any]) -> str:
    """Says whose seconds a row with these columns has: "a step", or "an epoch"."""
    from mmm_lab.runs.runs import row_of

    kind = row_of(names)
    if kind == "epoch":
        return "an epoch"
    return f"a {kind}"
