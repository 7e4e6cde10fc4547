"""The data of one metric's plot: x, y, the spread over ranks, and the limits of its axis."""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmm.errors import RecordError
from mmm.history.plots.own_work import hosts_of, own_work, slow
from mmm.history.record.dataset import about
from mmm.history.record.folder import OWN
from mmm.outside import parse_json, printable

if TYPE_CHECKING:
    import xarray

PART_NAMES = {"dtd": "data", "dtf": "forward", "dtb": "backward", "dto": "optimizer", "dtw": "waiting"}
PARTS = tuple(PART_NAMES)
ALONE = (OWN, "dtd")  # of a step's times, those in which no rank waits for another
_RATE = re.compile(r"(dt|sps|tps)")  # of these, rare outliers (start-up, hiccups) are left out


LARGEST = 1e300  # that is plotted: the plots add and subtract


class Series(NamedTuple):
    """One metric over the rows. Where it differs by rank, y is the median over ranks, between `low` and `high`."""

    name: str
    title: str
    unit: str
    x: np.ndarray  # (draw,)
    x_name: str
    y: np.ndarray  # (draw,)
    low: np.ndarray | None = None  # (draw,)
    high: np.ndarray | None = None  # (draw,)
    by_rank: np.ndarray | None = None  # (draw, rank)
    ranks: int = 1

    @property
    def label(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    @property
    def sparse(self) -> bool:
        """Fewer than half of the rows have it: a validation loss, say."""
        return bool(np.isfinite(self.y).sum() * 2 < len(self.y))


class AxisLimits(NamedTuple):
    """The shown range of y, and masks of the points that lie above or below it."""

    low: float
    high: float
    above: np.ndarray
    below: np.ndarray


def metrics(ds: "xarray.Dataset") -> list[str]:
    """What is worth a plot: every variable but the step counters; x_min, x_median and x_max count as one x."""
    names = [str(name) for name in ds.data_vars if name not in ("iter", "epoch")]
    reduced = {name[: -len("_median")] for name in names if name.endswith("_median") and f"{name[:-7]}_max" in names}
    over = {f"{base}_{which}": base for base in reduced for which in ("min", "median", "max")}
    return list(dict.fromkeys(over.get(name, name) for name in names))


def main_loss(ds: "xarray.Dataset") -> str | None:
    """What a run is judged by; None where it trains nothing."""
    return next((name for name in ("loss", "train_loss") if name in metrics(ds)), None)


def series(ds: "xarray.Dataset", name: str) -> Series:
    """The metric `name` of `ds`. RecordError where it has none of that name."""
    x, x_name = _x(ds)
    says = about(name)
    title, unit = says["long_name"], says.get("units", "")
    title = title.replace("of a step", "of an epoch") if x_name == "epoch" else title
    ranks = ds.sizes.get("rank", 1)
    if name in ds.data_vars:
        values = ds[name].values.astype(np.float64)
        if values.ndim == 1:
            return Series(name, title, unit, x, x_name, values, ranks=ranks)
        low, y, high = _over_ranks(values)
        return Series(name, title, unit, x, x_name, y, low, high, values, ranks)
    if f"{name}_median" in ds.data_vars:
        low, y, high = (ds[f"{name}_{which}"].values.astype(np.float64) for which in ("min", "median", "max"))
        return Series(name, title, unit, x, x_name, y, low, high, ranks=ranks)
    raise RecordError(f"the record holds no {name!r}. It holds: {', '.join(metrics(ds)) or 'nothing'}.")


def limits(s: Series) -> AxisLimits | None:
    """The range of y to show, None if there is nothing to show.

    Times and rates leave out up to 2 % of the rows (at least one) that would compress the others: the first step takes
    many times as long. Any other metric is shown in full, but for infinities and what is as good as one.
    """
    high = s.y if s.high is None else s.high
    low = s.y if s.low is None else s.low
    finite = (np.abs(low) < LARGEST) & (np.abs(high) < LARGEST)
    if not finite.any():
        return None
    top, bottom = float(high[finite].max()), float(low[finite].min())
    if _RATE.match(s.name) and not s.name.endswith("_argmax") and finite.sum() >= 5:
        left_out = max(1, int(finite.sum()) // 50)
        most = float(np.sort(high[finite])[-1 - left_out])
        least = float(np.sort(low[finite])[left_out])
        span = max(most - least, 0.02 * abs(most))
        top = float(high[finite & (high <= most + 3 * span)].max())
        bottom = float(low[finite & (low >= least - 3 * span)].min())
    return AxisLimits(bottom, top, above=high > top, below=low < bottom)


def outside(s: Series, shown: AxisLimits) -> str:
    """One line that says which points the limits leave out; empty if none."""
    says = []
    for where, values, which, far in (
        (shown.above, s.y if s.high is None else s.high, "above", np.nanmax),
        (shown.below, s.y if s.low is None else s.low, "below", np.nanmin),
    ):
        if count := int(where.sum()):
            extreme = float(far(values[where]))
            step = s.x[where & (values == extreme)][0]
            number = f"{extreme:,.0f}" if 1e4 <= abs(extreme) < 1e9 else f"{extreme:.4g}"
            reach = f"{number} {s.unit}".rstrip() + f" at {s.x_name} {step:g}"
            to = "" if count == 1 else "up to " if which == "above" else "down to "
            says.append(f"{count} row{'s' if count > 1 else ''} {which} the plot: {to}{reach}")
    return "; ".join(says)


def slowest(s: Series, ds: "xarray.Dataset") -> int | None:
    """The slowest rank, for its line in a plot.

    Of own work it is the rank that the others wait for (`mmm.history.plots.own_work.slow`). Of the time for data it is
    the rank whose median over the rows is the largest, if that is 5 % above the median of all ranks. None for times
    that contain waiting, which is longest on the ranks that are not slow.
    """
    if s.by_rank is None or s.ranks < 2 or s.name not in ALONE:
        return None
    if s.name == OWN:
        found = slow(work, hosts_of(ds)) if (work := own_work(ds)) is not None else None
        return None if found is None or found.is_host else found.rank
    medians = median_by_rank(s.by_rank)
    if not np.isfinite(medians).any():
        return None
    rank = int(np.nanargmax(medians))
    return rank if medians[rank] > 1.05 * float(np.nanmedian(medians)) else None


def median_by_rank(values: np.ndarray) -> np.ndarray:
    """(draw, rank) → the median over the rows of each rank, (rank,); NaN for a rank that gave no number."""
    return _over_ranks(values.T)[1]


def parts(ds: "xarray.Dataset") -> dict[str, np.ndarray]:
    """The parts of a step's time, (draw,) each in s: the mean over ranks, or the median where only that was kept."""
    known = metrics(ds)
    return {name: mean_over_ranks(series(ds, name)) for name in PARTS if name in known}


def mean_over_ranks(s: Series) -> np.ndarray:
    """(draw,): the mean over the ranks that gave a number, NaN if none did; `s.y` where the ranks were not kept."""
    if s.by_rank is None:
        return s.y
    counted = np.isfinite(s.by_rank).sum(axis=1)
    total = np.nansum(s.by_rank, axis=1)
    return np.divide(total, counted, out=np.full(len(total), np.nan), where=counted > 0)


def facts(ds: "xarray.Dataset") -> str:
    """One line about the run: rows, ranks, hosts, layout."""
    ranks = ds.sizes.get("rank", 1)
    says = [f"{ds.sizes['draw']} rows", f"{ranks} rank{'s' if ranks > 1 else ''}"]
    if "host" in ds.coords:
        hosts = len(set(ds["host"].values.tolist()))
        says.append(f"{hosts} host{'s' if hosts > 1 else ''}")
    layout = config_of(ds).get("layout")  # with ep, which ranks have no coordinate of
    if isinstance(layout, str) and layout != "1":
        says.append(f"layout {printable(layout)}")
    return " · ".join(says)


def config_of(ds: "xarray.Dataset") -> dict[str, Any]:
    """The run's config.json; empty where there is none, of another program, or damaged."""
    try:
        return dict(parse_json(ds.attrs.get("config", "{}")))
    except ValueError:
        return {}


def _over_ranks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(draw, rank) → smallest, median, largest over the ranks that gave a number, (draw,) each."""
    known = ~np.isnan(values).all(axis=1)
    low, middle, high = np.full((3, len(values)), np.nan)
    if known.any():
        low[known] = np.nanmin(values[known], axis=1)
        middle[known] = np.nanmedian(values[known], axis=1)
        high[known] = np.nanmax(values[known], axis=1)
    return low, middle, high


def _x(ds: "xarray.Dataset") -> tuple[np.ndarray, str]:
    """The first of iter, epoch that grows from row to row, or else the number of the row."""
    for name in ("iter", "epoch"):
        if name in ds.data_vars and ds[name].ndim == 1:
            x = ds[name].values
            if np.isfinite(x).all() and (np.diff(x) > 0).all():
                return x, name
    return ds["draw"].values, "row"
