"""The data of one metric's plot: x, y, the spread over ranks, and the range of its axis."""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.dataset import about
from mmm.outside import parse_json, printable
from mmm.units import counted

if TYPE_CHECKING:
    import xarray

PART_NAMES = {"dtd": "data", "dtf": "forward", "dtb": "backward", "dto": "optimizer", "dtw": "waiting"}
PARTS = tuple(PART_NAMES)
OVER_RANKS = ("min", "median", "max")
LARGEST = 1e300  # that is plotted: the plots add and subtract
_RATE = re.compile(r"(dt|sps|tps)")  # of these, rare outliers (start-up, hiccups) are left out


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

    @property
    def label(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def metrics(ds: "xarray.Dataset") -> list[str]:
    """What is worth a plot: every variable but the step counters; x_min, x_median and x_max count as one x."""
    names = [str(name) for name in ds.data_vars if name not in ("iter", "epoch")]
    bases: dict[str, str] = {}
    for name in names:
        base = name.removesuffix("_median")
        if base != name and f"{base}_max" in names:
            bases |= {f"{base}_{over}": base for over in OVER_RANKS}
    return list(dict.fromkeys(bases.get(name, name) for name in names))


def main_loss(ds: "xarray.Dataset") -> str | None:
    """What a run is judged by; None where it trains nothing."""
    return next((name for name in ("loss", "train_loss") if name in metrics(ds)), None)


def series(ds: "xarray.Dataset", name: str) -> Series:
    """The metric `name` of `ds`. RecordError where it has none of that name."""
    x, x_name = _x(ds)
    attributes = about(name)
    title = attributes["long_name"]
    if x_name == "epoch":
        title = title.replace("of a step", "of an epoch")
    unit = attributes.get("units", "")
    if name in ds.data_vars and ds[name].ndim == 1:
        return Series(name, title, unit, x, x_name, ds[name].values.astype(np.float64))
    if name in ds.data_vars:
        values = ds[name].astype(np.float64)
        columns = [getattr(values, over)("rank") for over in OVER_RANKS]  # without NaN
    elif f"{name}_median" in ds.data_vars:
        columns = [ds[f"{name}_{over}"].astype(np.float64) for over in OVER_RANKS]
    else:
        raise RecordError(f"the record holds no {name!r}. It holds: {', '.join(metrics(ds)) or 'nothing'}.")
    low, y, high = (column.values for column in columns)
    return Series(name, title, unit, x, x_name, y, low, high)


def limits(name: str, values: np.ndarray) -> tuple[float, float] | None:
    """The range of a metric's values to show; None if no value is finite.

    Times and rates leave out the outermost 2 % (at least one value), where these lie far from the others: the first
    step takes many times as long.
    """
    finite = np.sort(values[np.abs(values) < LARGEST])
    if not len(finite):
        return None
    low = float(finite[0])
    high = float(finite[-1])
    if _RATE.match(name) and len(finite) >= 5:
        left_out = max(1, len(finite) // 50)
        least = float(finite[left_out])
        most = float(finite[-1 - left_out])
        far = 3 * max(most - least, 0.02 * abs(most))
        low = float(finite[finite >= least - far][0])
        high = float(finite[finite <= most + far][-1])
    return low, high


def parts(ds: "xarray.Dataset") -> dict[str, np.ndarray]:
    """The parts of a step's time, (draw,) each in s: the mean over ranks, or the median where only that was kept."""
    known = metrics(ds)
    return {name: mean_over_ranks(ds, name) for name in PARTS if name in known}


def mean_over_ranks(ds: "xarray.Dataset", name: str) -> np.ndarray:
    """(draw,): the mean over the ranks that gave a number, NaN if none did; the median where that alone was kept."""
    if name not in ds.data_vars or ds[name].ndim == 1:
        return series(ds, name).y
    return ds[name].astype(np.float64).mean("rank", skipna=True).values


def facts(ds: "xarray.Dataset") -> str:
    """One line about the run: rows, ranks, hosts, layout."""
    texts = [counted(ds.sizes["draw"], "row"), counted(ds.sizes.get("rank", 1), "rank")]
    if "host" in ds.coords:
        texts.append(counted(len(set(ds["host"].values.tolist())), "host"))
    layout = config_of(ds).get("layout")  # with ep, which ranks have no coordinate of
    if isinstance(layout, str) and layout != "1":
        texts.append(f"layout {printable(layout)}")
    return " · ".join(texts)


def config_of(ds: "xarray.Dataset") -> dict[str, Any]:
    """The run's config.json; empty where there is none, of another program, or damaged."""
    try:
        return dict(parse_json(ds.attrs.get("config", "{}")))
    except ValueError:
        return {}


def _x(ds: "xarray.Dataset") -> tuple[np.ndarray, str]:
    """The first of iter, epoch that grows from row to row, or else the number of the row."""
    for name in ("iter", "epoch"):
        if name in ds.data_vars and ds[name].ndim == 1:
            x = ds[name].values
            if np.isfinite(x).all() and (np.diff(x) > 0).all():
                return x, name
    return ds["draw"].values, "row"
