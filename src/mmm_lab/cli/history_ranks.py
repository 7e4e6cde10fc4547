"""``mmm history RUN --ranks``: ranks × steps of own work, the step less waiting, and who holds the others up."""

from __future__ import annotations

import textwrap
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.errors import RecordError
from mmm.outside import printable
from mmm_lab.cli import whole

if TYPE_CHECKING:
    import xarray

    from mmm.history.plots.own_work import OwnWork

SHADES = ((0.05, "·"), (0.10, "░"), (0.25, "▒"), (0.50, "▓"), (np.inf, "█"))  # below which part of the step
LONGEST_HOST = 20  # characters
SPANS = 12  # lines of a record of many ranks
MOST_NAMED = 4  # ranks of a host


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
    table = _map(ds, work, width) if work.by_rank is not None else _spans(ds, work)
    return "\n".join([*table, "", textwrap.fill(f"slowest: {sentence(ds, work)}", width, subsequent_indent="  ")])


def sentence(ds: xarray.Dataset, work: OwnWork) -> str:
    """Who the others wait for, and how long."""
    from mmm.history.plots.own_work import SLOW, hosts_of, slow

    hosts = hosts_of(ds)
    found = slow(work, hosts)
    if found is None:
        return f"no rank holds the others up by more than {100 * SLOW:.0f} % of {a_row_of(ds)}"
    who = f"rank {found.rank} ({place(ds, found.rank)})"
    if found.is_host:
        of = [rank for rank, host in enumerate(hosts) if host == hosts[found.rank]]
        who = f"host {printable(hosts[found.rank])} (ranks {_ranks(of)}, most often {found.rank})"
    return (
        f"{who}: {found.over:.3g} s of work over the median rank in {a_row_of(ds)} of {found.step:.3g} s, "
        f"in {found.rows} of {found.of} rows; the others wait for it"
    )


def _ranks(of: list[int]) -> str:
    """As "4 to 7", or where others are between them "0, 2, 4 and 13 more"."""
    if of == list(range(of[0], of[-1] + 1)):
        return f"{of[0]} to {of[-1]}"
    return ", ".join(map(str, of[:MOST_NAMED])) + (f" and {len(of) - MOST_NAMED} more" if len(of) > MOST_NAMED else "")


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


def _map(ds: xarray.Dataset, work: OwnWork, width: int) -> list[str]:
    """A line a rank, a column for each row, or for several."""
    from mmm.history.plots.own_work import median_rank

    assert work.by_rank is not None
    labels = _labels(ds)
    room = max(10, width - len(labels[0]) - 20)
    spans = np.array_split(np.arange(len(work.dt)), min(room, len(work.dt)))
    dt = np.array([_mean(work.dt[span]) for span in spans])  # (columns,)
    own = np.array([_mean(work.by_rank[span]) for span in spans])  # (columns, rank)
    part = (own - median_rank(own)[:, None]) / dt[:, None]
    cells = ["".join(_shade(each) for each in part[:, rank]) for rank in range(own.shape[1])]
    seconds = _mean(work.by_rank[1:] if len(work.dt) > 1 else work.by_rank)
    step = float(_mean(work.dt[1:] if len(work.dt) > 1 else work.dt))
    of = "a row" if len(spans) == len(work.dt) else f"{-(-len(work.dt) // len(spans))} rows"
    lines = [
        f"own work of each rank ({work.name}: {a_row_of(ds)} less waiting), over the median rank, "
        f"as a part of the {a_row_of(ds).split()[1]}:",
        f"  {SHADES[0][1]} below 5 %   ░ to 10 %   ▒ to 25 %   ▓ to 50 %   █ above.  A column is {of}; {_range(ds)}.",
        "",
        f"{labels[0]}  {'':<{len(spans)}}  {'own s':>8}  {'waits':>6}",
    ]
    for rank, label in enumerate(labels[1:]):
        waits = f"{100 * max(1 - seconds[rank] / step, 0.0):.0f} %" if step > 0 and np.isfinite(seconds[rank]) else "-"
        lines.append(f"{label}  {cells[rank]}  {seconds[rank]:>8.3g}  {waits:>6}")
    return lines


def _labels(ds: xarray.Dataset) -> list[str]:
    """The head and each rank's: its number, host and mesh coordinates, in columns."""
    names = [name for name in ("host", *_axes(ds)) if name in ds.coords]
    columns = [["rank", *map(str, range(ds.sizes["rank"]))]]
    for name in names:
        texts = [printable(str(value)) for value in ds[name].values]
        shown = [text if len(text) <= LONGEST_HOST else f"…{text[1 - LONGEST_HOST :]}" for text in texts]
        columns.append([name.removeprefix("axis_"), *shown])
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(f"{cell:>{size}}" for cell, size in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]


def _spans(ds: xarray.Dataset, work: OwnWork) -> list[str]:
    """A line for some rows: smallest, median and largest over the ranks, and which had the largest most often."""
    from mmm.history.plots.own_work import most_often

    spans = np.array_split(np.arange(len(work.dt)), min(SPANS, len(work.dt)))
    name, values = _x(ds)
    lines = [
        f"own work ({work.name}: {a_row_of(ds)} less waiting for others), over {ds.sizes['rank']} ranks, in s",
        "",
        f"{name:>16}  {'min':>8}  {'median':>8}  {'max':>8}  most often the largest",
    ]
    for span in spans:
        columns = (_mean(ds[f"{work.name}_{over}"].values[span]) for over in ("min", "median", "max"))
        ranks = work.rank[span][np.isfinite(work.rank[span])].astype(int)
        which = "-"
        if len(ranks):
            rank, times = most_often(ranks)
            which = f"rank {rank} ({place(ds, rank)}) in {times} of {len(span)} rows"
        rows = f"{whole(values[span[0]])} to {whole(values[span[-1]])}"
        lines.append(f"{rows:>16}  " + "  ".join(f"{column:>8.3g}" for column in columns) + f"  {which}")
    return lines


def _shade(part: float) -> str:
    return next((shade for most, shade in SHADES if part < most), " ")  # NaN is below nothing


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


def _x(ds: xarray.Dataset) -> tuple[str, np.ndarray]:
    name = next((name for name in ("iter", "epoch") if name in ds and ds[name].ndim == 1), "draw")
    return "row" if name == "draw" else name, ds[name].values


def _range(ds: xarray.Dataset) -> str:
    name, values = _x(ds)
    return f"{name} {whole(values[0])} to {whole(values[-1])}"
