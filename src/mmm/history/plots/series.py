"""Prepares the data of a metric's plot: x, y, the spread over ranks, and the range of its axis."""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.dataset import about
from mmm.outside import parse_json, printable
from mmm.units import counted

if TYPE_CHECKING:
    import xarray

PART_NAMES = {
    "dtd": "data",
    "dtf": "forward",
    "dtb": "backward",
    "dto": "optimizer",
    "dtw": "waiting",
}

# The largest value that is plotted: plots add and subtract values, which must not overflow.
LARGEST = 1e300

# Names of times and rates. Their rare outliers (start-up, hiccups) are not shown.
_RATE = re.compile(r"(dt|sps|tps)")


class Series(NamedTuple):
    """One metric over the rows.

    Attributes:
        name: name of the metric.
        title: what the metric is.
        unit: its unit, or "".
        x: steps, epochs or rows, (draw,).
        x_name: what `x` counts.
        y: values, (draw,); the median over ranks if the metric differs by rank.
        is_median: whether it does.
    """

    name: str
    title: str
    unit: str
    x: np.ndarray
    x_name: str
    y: np.ndarray
    is_median: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def metrics(ds: "xarray.Dataset") -> list[str]:
    """List the metrics that are worth a plot: all variables except the step counters.

    If a variable x was reduced over ranks, x_min, x_median and x_max count as one metric x.
    """
    names = [str(name) for name in ds.data_vars if name not in ("iter", "epoch")]
    # Reduced name → metric.
    reduced: dict[str, str] = {}
    for name in names:
        base = name.removesuffix("_median")
        if base != name:
            for reduction in ("min", "median", "max"):
                reduced[f"{base}_{reduction}"] = base
    return list(dict.fromkeys(reduced.get(name, name) for name in names))


def main_loss(ds: "xarray.Dataset") -> str | None:
    """Name the loss that a run is judged by; None if the run trains nothing."""
    names = metrics(ds)
    for loss in ("loss", "train_loss"):
        if loss in names:
            return loss
    return None


def series(ds: "xarray.Dataset", name: str) -> Series:
    """Return the metric `name` of a run's dataset.

    Raises:
        RecordError: the dataset has no such metric.
    """
    x, x_name = _x(ds)
    attributes = about(name)
    title = attributes["long_name"]
    if x_name == "epoch":
        title = title.replace("of a step", "of an epoch")
    unit = attributes.get("units", "")
    if name in ds.data_vars:
        values = ds[name].astype(np.float64)
        if values.ndim == 1:
            return Series(name, title, unit, x, x_name, values.values)
        # (draw, rank); xarray's reductions ignore NaN.
        median = values.median("rank")
    elif f"{name}_median" in ds.data_vars:
        median = ds[f"{name}_median"].astype(np.float64)
    else:
        held = ", ".join(metrics(ds)) or "nothing"
        raise RecordError(f"the record holds no {name!r}. It holds: {held}.")
    return Series(name, title, unit, x, x_name, median.values, is_median=True)


def limits(name: str, values: np.ndarray) -> tuple[float, float] | None:
    """Return the smallest and the largest value of a metric to show; None if no value is finite.

    Times and rates leave out the outermost 2 % on each side (at least one value) if these lie far from the others. They
    leave out the first value if it lies outside of the others: the first step takes many times as long.
    """
    in_order = values[np.abs(values) < LARGEST]
    if not len(in_order):
        return None
    if _RATE.match(name) and len(in_order) >= 5:
        others = in_order[1:]
        in_order = in_order if others.min() <= in_order[0] <= others.max() else others
    finite = np.sort(in_order)
    low = float(finite[0])
    high = float(finite[-1])
    if _RATE.match(name) and len(finite) >= 5:
        n_outer = max(1, len(finite) // 50)
        least = float(finite[n_outer])
        most = float(finite[-1 - n_outer])
        # Values are far if their distance is more than three times the range of the others. Equal values have no range:
        # then 2 % of the value stand for it.
        far = 3 * max(most - least, 0.02 * abs(most))
        low = float(finite[finite >= least - far][0])
        high = float(finite[finite <= most + far][-1])
    return low, high


def parts(ds: "xarray.Dataset") -> dict[str, np.ndarray]:
    """Return the seconds of each part of a step: name → (draw,), as `mean_over_ranks`."""
    names = metrics(ds)
    return {name: mean_over_ranks(ds, name) for name in PART_NAMES if name in names}


def mean_over_ranks(ds: "xarray.Dataset", name: str) -> np.ndarray:
    """Return a metric's mean over the ranks that have a number, (draw,); NaN if none has one.

    If the record only has minimum, median and maximum over ranks, it is the median.
    """
    if name not in ds.data_vars or ds[name].ndim == 1:
        return series(ds, name).y
    values = ds[name].astype(np.float64)
    return values.mean("rank", skipna=True).values


def facts(ds: "xarray.Dataset") -> str:
    """Describe a run in one line: its rows, ranks, hosts and layout."""
    n_ranks = ds.sizes.get("rank", 1)
    texts = [counted(ds.sizes["draw"], "row"), counted(n_ranks, "rank")]
    if "host" in ds.coords:
        hosts = set(ds["host"].values.tolist())
        texts.append(counted(len(hosts), "host"))
    # From the config, because ranks have no coordinate along ep.
    layout = config_of(ds).get("layout")
    if isinstance(layout, str) and layout != "1":
        texts.append(f"layout {printable(layout)}")
    return " · ".join(texts)


def config_of(ds: "xarray.Dataset") -> dict[str, Any]:
    """Return the run's config.json; empty if there is none, or if it is another program's or damaged."""
    try:
        return dict(parse_json(ds.attrs.get("config", "{}")))
    except ValueError:
        return {}


def _x(ds: "xarray.Dataset") -> tuple[np.ndarray, str]:
    """Choose the x axis: the first of iter and epoch that grows from row to row, or else the number of the row."""
    for name in ("iter", "epoch"):
        if name in ds.data_vars and ds[name].ndim == 1:
            x = ds[name].values
            grows = (np.diff(x) > 0).all()
            if np.isfinite(x).all() and grows:
                return x, name
    return ds["draw"].values, "row"
