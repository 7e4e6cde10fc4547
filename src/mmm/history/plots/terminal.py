"""Draws a plot with characters, for a terminal or a text file."""

from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.series import limits, series
from mmm.units import counted

if TYPE_CHECKING:
    import xarray


def terminal_plot(
    ds: "xarray.Dataset",
    metric: str,
    width: int = 100,
    height: int = 20,
) -> str:
    """Draw a metric over the steps with characters (quarter blocks and box lines).

    A metric that differs by rank is drawn as the median over ranks. Rows outside the axes are counted below the plot.

    Args:
        ds: the run's dataset.
        metric: name of the metric.
        width: columns of the plot.
        height: lines of the plot.

    Raises:
        RecordError: the dataset holds no such metric.
    """
    import plotext

    s = series(ds, metric)
    title = s.label
    if s.title != s.name:
        title = f"{s.title} ({s.label})"
    if s.is_median:
        title += f", median of {ds.sizes['rank']} ranks"
    shown = limits(metric, s.y)
    if shown is None:
        return f"{title}: no finite value in {counted(len(s.y), 'row')}\n"
    low, high = shown
    outside = (s.y < low) | (s.y > high)
    inside = np.isfinite(s.y) & ~outside
    y_limits = _widened(low, high)
    x_limits = float(s.x[0]), float(s.x[-1])
    if len(s.x) == 1:
        x_limits = x_limits[0] - 1, x_limits[0] + 1
    # 1 is nothing beside some numbers. Of points that it cannot tell apart, plotext warns in colours.
    x_limits = _widened(*x_limits)
    # Otherwise a plot is at most as large as the terminal.
    plotext.terminal.limit(False, False)
    try:
        figure = plotext.figure
        figure.clear()
        figure.theme("colorless")
        figure.plot_size(width, height - 1)
        x = s.x[inside].tolist()
        y = s.y[inside].tolist()
        signal = figure.signal(x, y, marker="hd")
        # A validation loss has a value in few rows: its points are not joined by lines.
        most_rows_have_values = 2 * inside.sum() >= len(s.y)
        signal.lines(most_rows_have_values)
        figure.draw(signal)
        figure.title(title)
        figure.label(s.x_name)
        # Labels need room: a tick for each 14 columns, and for each 3 lines.
        x_ticks = _ticks(*x_limits, max(2, width // 14), integer=True)
        y_ticks = _ticks(*y_limits, max(2, (height - 1) // 3))
        for axis, axis_limits, ticks in (("x", x_limits, x_ticks), ("y", y_limits, y_ticks)):
            ruler = figure.ruler(axis)
            ruler.lim(*axis_limits)
            ruler.ticks(*ticks)
        drawn = figure.build().string(colorless=True)
    finally:
        plotext.terminal.limit(True, True)
    text = "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())
    if outside.any():
        text += f"  rows outside of the plot: {outside.sum()}\n"
    return text


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range for an axis. If all values are equal, it is a range around the value."""
    if high - low > 1e-9 * max(abs(high), abs(low)):
        return low, high
    around = 0.5 * (abs(low) or 1)
    return low - around, high + around


def _ticks(
    low: float,
    high: float,
    most: int,
    integer: bool = False,
) -> tuple[list[float], list[str]]:
    """Choose round values from `low` to `high`, and label them.

    Args:
        low: the smallest value of the axis.
        high: the largest value of the axis.
        most: the most ticks, about.
        integer: whether the ticks are whole numbers.

    Returns:
        The values and their labels.
    """
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(most, steps=[1, 2, 5, 10], integer=integer, min_n_ticks=1)
    # A value at an end of the axis counts, although it may be off in its last digit.
    slack = 1e-9 * (high - low)
    values = [float(value) for value in locator.tick_values(low, high) if low - slack <= value <= high + slack]
    if not values:
        values = [low]
    labels = []
    for value in values:
        if abs(value) < 1e6:
            labels.append(f"{value:,.10g}")
        else:
            labels.append(f"{value:g}")
    return values, labels
