"""A plot made of characters, for a terminal or a text file."""

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.series import limits, series
from mmm.units import counted

if TYPE_CHECKING:
    import xarray

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def terminal_plot(ds: "xarray.Dataset", metric: str, width: int = 100, height: int = 20, color: bool = False) -> str:
    """The metric over the steps in `width` × `height` characters (quarter blocks and box lines; colour if `color`).

    A metric that differs by rank is drawn as the median over ranks. Rows outside the axes are counted below the plot.

    Raises:
        RecordError: the dataset holds no such metric.
    """
    s = series(ds, metric)
    title = s.label if s.title == s.name else f"{s.title} ({s.label})"
    if s.high is not None:
        title += f", median of {ds.sizes['rank']} ranks"
    shown = limits(metric, s.y)
    if shown is None:
        return f"{title}: no finite value in {counted(len(s.y), 'row')}\n"
    low, high = shown
    outside = (s.y < low) | (s.y > high)
    inside = np.isfinite(s.y) & ~outside
    drawn = _draw(s.x, s.y, inside, s.x_name, title, _widened(low, high), width, height - 1, color)
    if outside.any():
        drawn += f"  rows outside of the plot: {outside.sum()}\n"
    return drawn


def _draw(
    x: np.ndarray,
    y: np.ndarray,
    inside: np.ndarray,
    x_name: str,
    title: str,
    y_limits: tuple[float, float],
    width: int,
    height: int,
    color: bool,
) -> str:
    """Draw the points that are inside the limits by plotext, joined by a line unless most rows have none."""
    import plotext

    left = float(x.min())
    right = float(x.max())
    if left == right:
        left -= 1
        right += 1
    plotext.terminal.limit(False, False)  # as wide as asked, whatever the terminal
    try:
        figure = plotext.figure
        figure.clear()
        figure.theme("colorless")
        figure.plot_size(width, height)
        marker = plotext.marker("hd", pixel="cyan") if color else "hd"
        signal = figure.signal(x[inside].tolist(), y[inside].tolist(), marker=marker)
        signal.lines(2 * inside.sum() >= len(y))  # of a validation loss points alone
        figure.draw(signal)
        figure.title(title)
        figure.label(x_name)
        figure.ruler("x").lim(left, right)
        figure.ruler("y").lim(*y_limits)
        figure.ruler("x").ticks(*_ticks(left, right, max(2, width // 14), integer=True))
        figure.ruler("y").ticks(*_ticks(*y_limits, max(2, height // 3)))
        drawn = figure.build().string(not color)
    finally:
        plotext.terminal.limit(True, True)
    if not color:
        drawn = _ESCAPES.sub("", drawn)
    return "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range for an axis: of a constant, one around it."""
    if high - low > 1e-9 * max(abs(high), abs(low)):
        return low, high
    around = 0.5 * (abs(low) or 1)
    return low - around, high + around


def _ticks(low: float, high: float, most: int, integer: bool = False) -> tuple[list[float], list[str]]:
    """Round values from `low` to `high`, at most about `most`, and their labels."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    if integer:
        step = max(step, 1.0)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    places = [count * step for count in range(first, last + 1)] or [low]
    digits = 1 + max(0, math.floor(math.log10(max(abs(low), abs(high)) / step)))
    return places, [f"{place:,.{max(digits, 3)}g}" if abs(place) < 1e6 else f"{place:g}" for place in places]
