"""A run on one page, drawn with matplotlib on `Figure` objects: loss, accuracy, where the time of a step went,
throughput."""

from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.series import (
    PART_NAMES,
    Series,
    facts,
    limits,
    main_loss,
    mean_over_ranks,
    metrics,
    parts,
    series,
)
from mmm.history.plots.style import new_figure
from mmm.history.record.dataset import marks_of
from mmm.palette import BLUE, GREEN, LIGHT, ORANGE, STEP_PARTS, VERMILION

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 1000  # a line of more is thinned: a page has no more pixels
MOST_BARS = 60
RATES = ("tps", "sps")


def summary_figure(ds: "xarray.Dataset", name: str) -> "Figure | None":
    """The run on one page. None without anything to show.

    Args:
        name: of the run, for the title.
    """
    panels = _panels(ds)
    if not panels or not ds.sizes["draw"]:
        return None
    height = 0.95 + 2.6 * len(panels)
    figure = new_figure(8.0, height)
    figure.text(0.02, 1 - 0.12 / height, name, fontsize=13, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.40 / height, facts(ds), color=LIGHT.muted, fontsize=9, va="top")
    figure.subplots_adjust(left=0.125, right=0.97, bottom=0.5 / height, top=1 - 1.1 / height, hspace=0.4)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    split = parts(ds)
    for axes, metric in zip(rows, panels, strict=True):
        s = series(ds, metric)
        if metric == "dt" and split:
            _draw_parts(axes, ds, s, split)
        else:
            _draw_series(axes, ds, s, GREEN if metric in RATES else BLUE)
        _draw_resumptions(axes, ds, s.x)
        axes.set_title(s.title[:1].upper() + s.title[1:], fontsize=10.5)
        axes.set_ylabel(s.label)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            # In the title's line: inside, it would lie on the bars of a run of two epochs.
            axes.legend(
                loc="lower right",
                bbox_to_anchor=(1, 1),
                ncols=6,
                borderaxespad=0.2,
                columnspacing=1.0,
                handlelength=1.2,
            )
    rows[-1].set_xlabel(s.x_name)
    return figure


def _panels(ds: "xarray.Dataset") -> list[str]:
    """The metrics that are drawn, from top to bottom: loss, accuracy, the time of a step, throughput."""
    known = metrics(ds)
    rates = [rate for rate in RATES if rate in known]
    return [metric for metric in (main_loss(ds), "test_acc", "dt", *rates[:1]) if metric in known]


def _draw_series(axes: "Axes", ds: "xarray.Dataset", s: Series, color: str) -> None:
    """A line, of the median over ranks where they differ; and the loss held out, as markers."""
    values = [s.y]
    marker = "o" if len(s.x) < 25 else None
    axes.plot(*_thin(s.x, s.y), color=color, lw=1.6, marker=marker, ms=3, label=s.name)
    for twin in (f"val_{s.name}", f"test_{s.name.removeprefix('train_')}"):
        if twin in metrics(ds) and twin != s.name:
            held_out = series(ds, twin)
            axes.plot(held_out.x, held_out.y, "o", ms=5, mfc=LIGHT.paper, mec=ORANGE, mew=1.5, label=twin, zorder=5)
            values.append(held_out.y)
    _set_limits(axes, s.x, s.y, limits(s.name, np.concatenate(values)))


def _draw_parts(axes: "Axes", ds: "xarray.Dataset", s: Series, split: dict[str, np.ndarray]) -> None:
    """The parts of a step stacked, and the full step as a line: the gap is time that no part accounts for."""
    full = mean_over_ranks(ds, "dt")
    steps, line = _thin(s.x, full)
    is_short = len(steps) <= MOST_BARS  # with few steps, an area would join a slow first step to the second
    base = np.zeros(len(steps))
    for name, seconds in split.items():
        _, height = _thin(s.x, np.nan_to_num(seconds))
        if is_short:
            axes.bar(steps, height, 0.85 * _distance(steps), base, color=STEP_PARTS[name], label=PART_NAMES[name])
        else:
            axes.fill_between(steps, base, base + height, color=STEP_PARTS[name], lw=0, label=PART_NAMES[name])
        base = base + height
    marker = "_" if is_short else "-"
    axes.plot(steps, line, marker, color=LIGHT.ink, lw=1.0, label=f"full {'epoch' if s.x_name == 'epoch' else 'step'}")
    _set_limits(axes, s.x, full, limits(s.name, full), from_zero=True)


def _draw_resumptions(axes: "Axes", ds: "xarray.Dataset", x: np.ndarray) -> None:
    """A line between two rows, where the run was resumed."""
    for index, mark in enumerate(marks_of(ds)):
        first = int(np.searchsorted(ds["draw"].values, mark["draw"]))
        between = x[max(first - 1, 0) : first + 1].mean()
        axes.axvline(between, color=LIGHT.muted, lw=1.0, ls=":", label="" if index else "resumed")


def _set_limits(
    axes: "Axes", x: np.ndarray, y: np.ndarray, shown: tuple[float, float] | None, from_zero: bool = False
) -> None:
    """Limits with a margin; whole numbers of steps; a triangle at the edge for each row beyond it."""
    from matplotlib.ticker import MaxNLocator

    if shown is not None:
        low, high = shown
        if from_zero:
            low = 0.0
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(0.0 if from_zero else low - margin, high + margin)
        for rows, height, marker in ((y > high, 0.96, "^"), (y < low, 0.04, "v")):
            if rows.any():
                edge = np.full(rows.sum(), height)
                axes.plot(x[rows], edge, marker, color=VERMILION, ms=6, transform=axes.get_xaxis_transform(), zorder=6)
    beside = 0.02 * float(np.ptp(x))
    if len(x) <= MOST_BARS:
        beside = max(beside, 0.6 * _distance(x))
    axes.set_xlim(x.min() - beside, x.max() + beside)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10]))


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The finite points, at most `MOST_POINTS` of them: every k-th."""
    every = -(-len(x) // MOST_POINTS)
    finite = np.isfinite(y)
    return x[finite][::every], y[finite][::every]


def _distance(x: np.ndarray) -> float:
    """The smallest distance between two steps."""
    different = np.unique(x)
    return float(np.diff(different).min()) if len(different) > 1 else 1.0
