"""Draws a run on one page with matplotlib: loss, accuracy, the parts of a step's time, throughput."""

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

# A line with more points is thinned: a page does not have more pixels.
MOST_POINTS = 1000
RATES = ("tps", "sps")


def summary_figure(ds: "xarray.Dataset", name: str) -> "Figure | None":
    """Draw a run on one page; None if there is nothing to show.

    Args:
        ds: the run's dataset.
        name: name of the run, for the title.
    """
    panels = _panels(ds)
    if not panels or not ds.sizes["draw"]:
        return None
    # Inches; positions on a figure are fractions of it.
    height = 0.95 + 2.6 * len(panels)
    figure = new_figure(8.0, height)
    figure.text(
        0.02,
        1 - 0.12 / height,
        name,
        fontsize=13,
        fontweight="bold",
        va="top",
    )
    figure.text(
        0.02,
        1 - 0.40 / height,
        facts(ds),
        fontsize=9,
        color=LIGHT.muted,
        va="top",
    )
    figure.subplots_adjust(
        left=0.125,
        right=0.97,
        bottom=0.5 / height,
        top=1 - 1.1 / height,
        hspace=0.4,
    )
    # One below the other, with one x axis.
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(rows, panels, strict=True):
        drawn = ds
        # Times and rates are means over the steps of a row.
        if metric == "dt" or metric in RATES:
            drawn = ds.isel(draw=_usual_rows(series(ds, metric).x))
        s = series(drawn, metric)
        split = parts(drawn)
        if metric == "dt" and split and np.isfinite(s.y).any():
            _draw_parts(axes, drawn, s, split)
        else:
            color = BLUE
            if metric in RATES:
                color = GREEN
            _draw_series(axes, drawn, s, color)
        _draw_resumptions(axes, ds, series(ds, metric).x)
        first = s.title[:1].upper()
        rest = s.title[1:]
        axes.set_title(first + rest, fontsize=10.5)
        axes.set_ylabel(s.label)
        _, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            # In the line of the title: inside, it would lie on the bars of a run of two epochs.
            axes.legend(
                loc="lower right",
                bbox_to_anchor=(1, 1),
                ncols=6,
                borderaxespad=0.2,
                columnspacing=1.0,
                handlelength=1.2,
            )
    _set_steps(rows[-1], series(ds, panels[0]).x)
    rows[-1].set_xlabel(s.x_name)
    return figure


def _panels(ds: "xarray.Dataset") -> list[str]:
    """List the metrics that are drawn, from top to bottom: loss, accuracy, the time of a step, throughput."""
    names = metrics(ds)
    # Tokens per second if the run has them, else samples per second.
    rates = [rate for rate in RATES if rate in names][:1]
    panels = (main_loss(ds), "test_acc", "dt", *rates)
    return [metric for metric in panels if metric in names]


def _usual_rows(x: np.ndarray) -> np.ndarray:
    """Return the rows that cover at least half as many steps as most rows do, as indices.

    With ``--log_every 10`` the row after an evaluation may cover one step. It would be a needle among means over ten.
    """
    steps = np.diff(x, prepend=x[0] - 1)
    return np.flatnonzero(2 * steps >= np.median(steps))


def _draw_series(axes: "Axes", ds: "xarray.Dataset", s: Series, color: str) -> None:
    """Draw a metric as a line, the median over ranks if they differ, and its values on held-out data as markers."""
    shown = [s.y]
    marker = None
    if len(s.x) < 25:
        marker = "o"
    x, y = _thin(s.x, s.y)
    axes.plot(
        x,
        y,
        color=color,
        lw=1.6,
        marker=marker,
        ms=3,
        label=s.name,
    )
    # loss has val_loss and test_loss, train_loss has test_loss.
    validation = f"val_{s.name}"
    test = f"test_{s.name.removeprefix('train_')}"
    for name in (validation, test):
        if name in metrics(ds) and name != s.name:
            held_out = series(ds, name).y
            axes.plot(
                s.x,
                held_out,
                "o",
                ms=5,
                mfc=LIGHT.paper,
                mec=ORANGE,
                mew=1.5,
                label=name,
                zorder=5,
            )
            shown.append(held_out)
    y_limits = limits(s.name, np.concatenate(shown))
    _set_limits(axes, s.x, s.y, y_limits)


def _draw_parts(axes: "Axes", ds: "xarray.Dataset", s: Series, split: dict[str, np.ndarray]) -> None:
    """Draw the parts of a step stacked, and the full step as a line. The gap is time that no part accounts for.

    Args:
        axes: where to draw.
        ds: the run's dataset.
        s: the time of a step.
        split: name → seconds of each part, (draw,).
    """
    full = mean_over_ranks(ds, "dt")
    steps, line = _thin(s.x, full)
    edges = _edges(steps)
    base = np.zeros(len(steps))
    for name, seconds in split.items():
        # The same rows as of the full step.
        seconds = np.nan_to_num(seconds)
        seconds[~np.isfinite(full)] = np.nan
        _, height = _thin(s.x, seconds)
        top = base + height
        axes.stairs(
            top,
            edges,
            baseline=base,
            fill=True,
            color=STEP_PARTS[name],
            label=PART_NAMES[name],
        )
        base = top
    full_label = "full step"
    if s.x_name == "epoch":
        full_label = "full epoch"
    axes.stairs(
        line,
        edges,
        baseline=None,
        color=LIGHT.ink,
        lw=1.0,
        label=full_label,
    )
    y_limits = limits(s.name, full)
    _set_limits(axes, s.x, full, y_limits, from_zero=True)


def _draw_resumptions(axes: "Axes", ds: "xarray.Dataset", x: np.ndarray) -> None:
    """Draw a vertical line between two rows where the run was resumed."""
    for index, mark in enumerate(marks_of(ds)):
        draws = ds["draw"].values
        first = int(np.searchsorted(draws, mark["draw"]))
        before = max(first - 1, 0)
        between = x[before : first + 1].mean()
        # One entry in the legend for all of them.
        label = "" if index else "resumed"
        axes.axvline(between, color=LIGHT.muted, lw=1.0, ls=":", label=label)


def _set_limits(
    axes: "Axes",
    x: np.ndarray,
    y: np.ndarray,
    shown: tuple[float, float] | None,
    from_zero: bool = False,
) -> None:
    """Set the limits of the y axis, with margins, and mark each row outside them by a triangle at the edge.

    Args:
        axes: axes to set.
        x: steps, (draw,).
        y: values, (draw,).
        shown: the smallest and the largest value to show; None if no value is finite.
        from_zero: whether the y axis begins at 0.
    """
    if shown is not None:
        low, high = shown
        if from_zero:
            low = 0.0
        # A constant has no range: then the margin is a fraction of its value.
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        bottom = low - margin
        if from_zero:
            bottom = 0.0
        axes.set_ylim(bottom, high + margin)
        # Heights are fractions of the axes: in this transform, only x is in data units.
        transform = axes.get_xaxis_transform()
        above = (y > high, 0.96, "^")
        below = (y < low, 0.04, "v")
        for rows, height, marker in (above, below):
            if rows.any():
                heights = np.full(rows.sum(), height)
                axes.plot(
                    x[rows],
                    heights,
                    marker,
                    color=VERMILION,
                    ms=6,
                    transform=transform,
                    zorder=6,
                )


def _set_steps(axes: "Axes", x: np.ndarray) -> None:
    """Set the x axis, which all panels share, to all rows, (draw,), with margins."""
    from matplotlib.ticker import MaxNLocator

    edges = _edges(x)
    margin = 0.02 * (edges[-1] - edges[0])
    axes.set_xlim(edges[0] - margin, edges[-1] + margin)
    locator = MaxNLocator(
        nbins=9,
        integer=True,
        steps=[1, 2, 5, 10],
    )
    axes.xaxis.set_major_locator(locator)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite points, at most about `MOST_POINTS` of them: every k-th."""
    stride = -(-len(x) // MOST_POINTS)
    finite = np.isfinite(y)
    x = x[finite]
    y = y[finite]
    return x[::stride], y[::stride]


def _edges(steps: np.ndarray) -> np.ndarray:
    """Return where the bar of each step begins, and where the last one ends: halfway to its neighbours."""
    if len(steps) < 2:
        step = steps[0]
        return np.array([step - 0.5, step + 0.5])
    between = (steps[1:] + steps[:-1]) / 2
    first = 2 * steps[0] - between[0]
    last = 2 * steps[-1] - between[-1]
    return np.concatenate(([first], between, [last]))
