"""The picture of one metric of a run, drawn with matplotlib on `Figure` objects: no pyplot, no window."""

from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.lines import sentence, thin
from mmm.history.plots.series import AxisLimits, Series, limits, metrics, outside, series, slowest
from mmm.history.plots.style import new_figure, theme
from mmm.history.record.dataset import marks_of
from mmm.palette import BLUE, GREEN, ORANGE, STEP_PARTS, VERMILION

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 60
RATES = ("tps", "sps", "tps_per_gpu", "sps_per_gpu")
NOTE = "note"  # the mark of a text above the axes


def metric_figure(ds: "xarray.Dataset", name: str) -> "Figure":
    """One metric over the steps: a line; or the median over ranks, a band from min to max, a thin line a rank."""
    s = series(ds, name)
    figure = new_figure(7.2, 3.8)
    figure.subplots_adjust(left=0.125, right=0.97, bottom=0.14, top=0.82)  # fixed: every metric lines up
    axes = figure.add_subplot()
    draw_series(axes, s, ds)
    head(axes, s.title if s.title == s.name else sentence(s.title))
    axes.set_ylabel(s.label)
    return figure


def color_of(name: str) -> str:
    """Of a metric's line: parts of a step have theirs, as where they are stacked."""
    return STEP_PARTS.get(name, GREEN if name in RATES else BLUE)


def draw_series(axes: "Axes", s: Series, ds: "xarray.Dataset") -> None:
    """Draw `s` and set the limits; a note above the axes names the points outside."""
    axes.set_xlabel(s.x_name)
    shown = limits(s)
    if shown is None:
        axes.text(0.5, 0.5, "no finite value", ha="center", va="center", transform=axes.transAxes, color=theme().muted)
        return
    _draw_one(axes, s, shown, color_of(s.name), slowest(s, ds))
    set_limits(axes, s, _overlay(axes, s, ds, shown))
    resumptions(axes, s.x, ds)


def _draw_one(axes: "Axes", s: Series, shown: AxisLimits, color: str, slow: int | None) -> None:
    finite = np.isfinite(s.y)
    x, y = s.x[finite], s.y[finite]
    if s.high is not None and s.low is not None:
        _spread(axes, s, color, slow)
        axes.plot(*thin(x, y), color=color, lw=1.6, label=f"median of {s.ranks} ranks")
    elif s.name.endswith("_argmax"):
        axes.plot(x, y, ".", ms=4, color=color)
    elif s.sparse or len(x) < 3:
        axes.plot(x, y, color=color, lw=1.2, label=s.name)
        _markers(axes, x, y, shown, color, 4)
    else:
        axes.plot(*thin(x, y), color=color, lw=1.6, label=s.name)
        if len(x) <= 25:
            _markers(axes, x, y, shown, color, 3)


def _markers(axes: "Axes", x: np.ndarray, y: np.ndarray, shown: AxisLimits, color: str, size: float) -> None:
    """Those within the limits, none of them cut by the frame."""
    inside = (y >= shown.low) & (y <= shown.high)
    axes.plot(x[inside], y[inside], "o", ms=size, color=color, clip_on=False, zorder=4)


def resumptions(axes: "Axes", x: np.ndarray, ds: "xarray.Dataset") -> None:
    """A line between two rows, where the run was resumed."""
    for number, mark in enumerate(marks_of(ds)):
        first = int(np.searchsorted(ds["draw"].values, mark["draw"]))
        between = x[max(first - 1, 0) : first + 1].mean()
        axes.axvline(between, color=theme().muted, lw=1.0, ls=":", label="" if number else "resumed")


def _spread(axes: "Axes", s: Series, color: str, slow: int | None) -> None:
    if s.low is None or s.high is None:
        return
    x, low = thin(s.x, s.low, np.fmin)
    _, high = thin(s.x, s.high, np.fmax)
    axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0, label="min to max")
    if s.by_rank is not None:
        width = 0.5 if s.ranks > 8 else 0.7
        for rank in range(s.by_rank.shape[1]):
            label = "" if rank else "each rank"
            axes.plot(*thin(s.x, s.by_rank[:, rank]), color=color, lw=width, alpha=0.65, label=label)
        if slow is not None:
            slow_y = s.by_rank[:, slow]
            axes.plot(*thin(s.x, slow_y), color=VERMILION, lw=1.0, alpha=0.8, label=f"rank {slow}, slowest")


def _overlay(axes: "Axes", s: Series, ds: "xarray.Dataset", shown: AxisLimits) -> AxisLimits:
    """Draw the validation or test metric of the same name as markers. Returns limits that have it inside."""
    twins = (f"val_{s.name}", f"test_{s.name.removeprefix('train_')}")
    twin = next((name for name in twins if name in metrics(ds) and name != s.name), None)
    if twin is None:
        return shown
    v = series(ds, twin)
    finite = np.isfinite(v.y)
    if not finite.any():
        return shown
    look = {"mfc": theme().paper, "mec": ORANGE, "mew": 1.5}
    axes.plot(v.x[finite], v.y[finite], "o", ms=5, label=twin, zorder=5, clip_on=False, **look)  # type: ignore[arg-type]
    low, high = float(v.y[finite].min()), float(v.y[finite].max())
    return shown._replace(low=min(shown.low, low), high=max(shown.high, high))


def set_limits(axes: "Axes", s: Series, shown: AxisLimits) -> None:
    """Limits with a margin; triangles within the edge and a note above the axes for points outside."""
    from matplotlib.ticker import MaxNLocator

    margin = 0.06 * (shown.high - shown.low) or 0.05 * abs(shown.high) or 1.0
    low, high = shown.low - margin, shown.high + margin
    if shown.low >= 0 > low or (shown.low >= 0 and shown.low < 0.35 * shown.high):
        low = 0.0  # close to zero: show it
    finite = s.y[np.isfinite(s.y)]
    logarithmic = "loss" in s.name and finite.min() > 0 and finite.max() > 100 * finite.min()
    if logarithmic:
        axes.set_yscale("log")
    elif s.name.endswith("_argmax"):
        axes.set_ylim(-0.5, s.ranks - 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    else:
        axes.set_ylim(low, high)
    beside = 0.55 * bar_step(s.x) if len(s.x) <= MOST_BARS else 0.02 * float(s.x.max() - s.x.min())
    axes.set_xlim(s.x.min() - beside, s.x.max() + beside)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10]))
    smallest = s.y if s.low is None else s.low
    shown = shown._replace(below=shown.below & (smallest < low))  # from zero on the axis may have them all
    for where, place, marker in ((shown.above, 0.972, "^"), (shown.below, 0.028, "v")):
        if where.any():
            at = np.full(where.sum(), place)
            axes.plot(s.x[where], at, marker, color=VERMILION, ms=6, transform=axes.get_xaxis_transform(), zorder=6)
    if note := outside(s, shown):
        axes.text(0, 1.02, note, transform=axes.transAxes, color=VERMILION, fontsize=8.5, va="bottom", gid=NOTE)


def head(axes: "Axes", title: str, size: float = 12) -> None:
    """The title above the axes, and above the note if there is one; the legend where it covers least."""
    up = 20 if any(text.get_gid() == NOTE for text in axes.texts) else 6  # points
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best", frameon=True, framealpha=0.8, edgecolor="none")
    axes.set_title(title, fontsize=size, pad=up, y=1.0)  # y: not computed at each draw


def bar_step(x: np.ndarray) -> float:
    """The smallest distance between two steps."""
    different = np.unique(x)
    return float(np.diff(different).min()) if len(different) > 1 else 1.0
