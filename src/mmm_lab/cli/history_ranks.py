"""``mmm history RUN --ranks``: each rank's own work, the step less waiting, and who holds the others up."""

from __future__ import annotations

import textwrap
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.folder import OWN
from mmm.outside import printable
from mmm_lab.columns import in_columns

if TYPE_CHECKING:
    import xarray

    from mmm.history.plots.own_work import OwnWork


def ranks_text(ds: xarray.Dataset, width: int) -> str:
    """The table and the sentence. RecordError: the record does not tell own work from waiting."""
    from mmm.history.plots.own_work import NOT_KNOWN, own_work

    if ds.sizes.get("rank", 1) < 2:
        raise RecordError("--ranks: the run is of one rank, which waits for no other")
    if not ds.sizes["draw"]:
        raise RecordError("--ranks: the run has no rows yet")
    work = own_work(ds)
    if work is None:
        raise RecordError(f"--ranks: {NOT_KNOWN} (docs/trainers.md says where it is)")
    table = _each(ds, work) if work.by_rank is not None else _of_all(ds)
    return "\n".join([*table, "", textwrap.fill(f"slowest: {sentence(ds, work)}", width, subsequent_indent="  ")])


def sentence(ds: xarray.Dataset, work: OwnWork) -> str:
    """Who the others wait for, and how long."""
    from mmm.history.plots.own_work import SLOW, slow

    found = slow(work)
    if found is None:
        return f"no rank holds the others up by more than {100 * SLOW:.0f} % of {a_row_of(ds)}"
    who = f"rank {found.rank} ({place(ds, found.rank)})"
    return (
        f"{who}: {found.over:.3g} s of work over the median rank in {a_row_of(ds)} of {found.step:.3g} s, "
        f"in {found.rows} of {found.of} rows; the others wait for it"
    )


def place(ds: xarray.Dataset, rank: int) -> str:
    """Where a rank is: ``host n1, local_rank 0, tp 1``."""
    names = ["host", "local_rank", *_axes(ds)]
    inside = 0 <= rank < ds.sizes.get("rank", 1)
    at = [f"{name.removeprefix('axis_')} {ds[name].values[rank]}" for name in names if inside and name in ds.coords]
    return printable(", ".join(at)) or "place unknown"


def _axes(ds: xarray.Dataset) -> list[str]:
    """The mesh's axes along which ranks differ, by the names of their coordinates."""
    axes = sorted(str(name) for name in ds.coords if str(name).startswith("axis_"))
    return [name for name in axes if len(set(ds[name].values.tolist())) > 1]


def _each(ds: xarray.Dataset, work: OwnWork) -> list[str]:
    """A line a rank: the means over the rows, without the first."""
    assert work.by_rank is not None
    first = 1 if len(work.dt) > 1 else 0
    seconds = _mean(work.by_rank[first:])
    step = float(_mean(work.dt[first:]))
    names = [name for name in ("host", *_axes(ds)) if name in ds.coords]
    rows = [["rank", *(name.removeprefix("axis_") for name in names), "   own s", " waits"]]
    for rank, own in enumerate(seconds):
        waits = f"{100 * max(1 - own / step, 0.0):.0f} %" if step > 0 and np.isfinite(own) else "-"
        places = [printable(str(ds[name].values[rank])) for name in names]
        rows.append([str(rank), *places, f"{own:.3g}", waits])
    return [f"own work of each rank ({OWN}: {a_row_of(ds)} less waiting)", "", *in_columns(rows, range(len(rows[0])))]


def _of_all(ds: xarray.Dataset) -> list[str]:
    """Smallest, median and largest over the ranks, where a record has no more."""
    lines = [f"own work ({OWN}: {a_row_of(ds)} less waiting for others), over {ds.sizes['rank']} ranks"]
    for over in ("min", "median", "max"):
        lines.append(f"  {over:<8}{_mean(ds[f'{OWN}_{over}'].values):.3g} s")
    return lines


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the rows, of those with a number; NaN where none has."""
    finite = np.isfinite(values)
    total, count = np.where(finite, values, 0.0).sum(axis=0), finite.sum(axis=0)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def a_row_of(names: Container[Any]) -> str:
    """Whose seconds a row with these columns has: "a step", or "an epoch"."""
    from mmm_lab.runs.runs import row_of

    kind = row_of(names)
    return f"an {kind}" if kind == "epoch" else f"a {kind}"
