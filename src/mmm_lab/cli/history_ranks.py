"""``mmm history RUN --ranks``: each rank's own work, the step minus waiting, and who holds the others up."""

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

AXIS = "axis_"  # before the name of a mesh's axis, in that of a coordinate of the dataset


def ranks_text(ds: xarray.Dataset, width: int) -> str:
    """Returns the table and the sentence. RecordError: the record does not tell own work from waiting."""
    from mmm.history.plots.own_work import NOT_KNOWN, is_timed

    n_ranks = ds.sizes.get("rank", 1)
    if n_ranks < 2:
        raise RecordError("--ranks: the run is of one rank, which waits for no other")
    if not is_timed(ds):
        raise RecordError(f"--ranks: {NOT_KNOWN} (docs/trainers.md says where it is)")
    slowest = textwrap.fill(
        f"slowest: {slowest_text(ds)}",
        width,
        subsequent_indent="  ",
    )
    lines = [*_table(ds), "", slowest]
    return "\n".join(lines)


def slowest_text(ds: xarray.Dataset) -> str:
    """Says who the others wait for, and how long; empty if that was not timed."""
    from mmm.history.plots.own_work import SLOW, is_timed, slow

    if not is_timed(ds):
        return ""
    slowest = slow(ds)
    if slowest is None:
        percent = 100 * SLOW
        return f"no rank holds the others up by more than {percent:.0f} % of {a_row_of(ds)}"
    # "the others wait for it" is only known of a rank that is slow in most of the rows (`own_work.slow`).
    where = place(ds, slowest.rank)
    who = f"rank {slowest.rank} ({where})"
    row = f"{a_row_of(ds)} of {slowest.step:.3g} s"
    more_work = f"{slowest.over:.3g} s more work than the median rank in {row}"
    in_rows = f"in {slowest.rows} of {slowest.of} rows"
    return f"{who}: {more_work}, {in_rows}; the others wait for it"


def place(ds: xarray.Dataset, rank: int) -> str:
    """Says where a rank is: ``host n1, local_rank 0, tp 1``."""
    places = []
    for name, values in _places(ds, "host", "local_rank").items():
        places.append(f"{name} {values[rank]}")
    return printable(", ".join(places)) or "place unknown"


def _places(ds: xarray.Dataset, *names: str) -> dict[str, np.ndarray]:
    """Returns where each rank is, (rank,): the coordinates `names`, and those on the axes along which ranks differ."""
    places = {name: ds[name].values for name in names if name in ds.coords}
    for name in sorted(map(str, ds.coords)):
        values = ds[name].values
        distinct = set(values.tolist())
        if name.startswith(AXIS) and len(distinct) > 1:
            places[name.removeprefix(AXIS)] = values
    return places


def _table(ds: xarray.Dataset) -> list[str]:
    """Returns a line for each rank, with means over the rows; or three, where a record has no more."""
    from mmm.history.plots.own_work import after_warm_up

    ds = after_warm_up(ds)
    title = f"own work of each rank ({OWN}: {a_row_of(ds)} minus waiting)"
    if OWN not in ds:
        rows = [["over the ranks", "own s"]]
        for name in ("min", "median", "max"):
            seconds = float(ds[f"{OWN}_{name}"].mean())
            rows.append([name, f"{seconds:.3g}"])
        return [title, "", *in_columns(rows, [1])]
    # xarray's means leave out rows without a number.
    slowest_dt = ds["dt"].max("rank")
    step = float(slowest_dt.mean())
    places = _places(ds, "host")
    rows = [["rank", *places, "   own s", " waits"]]
    for rank, own in enumerate(ds[OWN].mean("draw").values):
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
    all_columns = range(len(rows[0]))
    return [title, "", *in_columns(rows, all_columns)]


def a_row_of(names: Container[Any]) -> str:
    """Says whose seconds a row with these columns has: "a step", or "an epoch"."""
    from mmm_lab.runs.runs import row_of

    kind = row_of(names)
    if kind == "epoch":
        return "an epoch"
    return f"a {kind}"
