"""A plot made of characters, for a terminal or a text file."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.series import Series, limits, series
from mmm.units import counted

if TYPE_CHECKING:
    import xarray

WHOLE = ("iter", "epoch", "row", "ranks")  # names of x that have whole numbers
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def terminal_plot(ds: "xarray.Dataset", metric: str, width: int = 100, height: int = 20, color: bool = False) -> str:
    """The metric over the steps in `width` × `height` characters (quarter blocks and box lines; colour if `color`).

    A metric that differs by rank is drawn as the median over ranks. Rows outside the axes are counted below the plot.

    Raises:
        RecordError: the dataset holds no such metric.
    """
    s = series(ds, metric)
    name = s.label if s.title == s.name else f"{s.title} ({s.label})"
    if s.high is not None:
        name += f", median of {ds.sizes['rank']} ranks"
    shown = limits(metric, s.y)
    if shown is None:
        return f"{name}: no finite value in {counted(len(s.y), 'row')}\n"
    low, high = shown
    drawn = plot_by_letters([s], name, low, high, width, height - 1, color)
    outside = int(((s.y < low) | (s.y > high)).sum())
    return f"{drawn}  rows outside of the plot: {outside}\n" if outside else drawn


def plot_by_letters(
    curves: Sequence[Series], title: str, low: float, high: float, width: int, height: int, color: bool = False
) -> str:
    """The curves between two values of y in `width` × `height` characters by plotext, each by a letter; one alone as a
    line. Of points that coincide the last is shown."""
    import plotext

    low, high = widened(low, high)
    left = min(float(s.x.min()) for s in curves)
    right = max(float(s.x.max()) for s in curves)
    if left == right:
        left, right = left - 1, right + 1
    plotext.terminal.limit(False, False)  # as wide as asked, whatever the terminal
    try:
        figure = plotext.figure
        figure.clear()
        figure.theme("colorless")
        figure.plot_size(width, height)
        for s, letter in zip(curves, LETTERS * len(curves), strict=False):
            inside = np.flatnonzero(np.isfinite(s.y) & (s.y >= low) & (s.y <= high))
            marker: object = letter
            if len(curves) == 1:
                marker = plotext.marker("hd", pixel="cyan") if color else "hd"
            signal = figure.signal(s.x[inside].tolist(), s.y[inside].tolist(), marker=marker)
            signal.lines(len(curves) == 1 and 2 * len(inside) >= len(s.y))  # of a validation loss points alone
            figure.draw(signal)
        figure.title(title)
        figure.label(curves[0].x_name)
        figure.ruler("x").lim(left, right)
        figure.ruler("y").lim(low, high)
        figure.ruler("x").ticks(*ticks(left, right, max(2, width // 14), curves[0].x_name in WHOLE))
        figure.ruler("y").ticks(*ticks(low, high, max(2, height // 3)))
        drawn = figure.build().string(not color)
    finally:
        plotext.terminal.limit(True, True)
    if not color:
        drawn = _ESCAPES.sub("", drawn)
    return "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())


def widened(low: float, high: float) -> tuple[float, float]:
    """A range for an axis: of a constant, one around it."""
    if high - low > 1e-9 * max(abs(high), abs(low)):
        return low, high
    around = 0.5 * (abs(low) or 1)
    return low - around, high + around


def ticks(low: float, high: float, most: int, integer: bool = False) -> tuple[list[float], list[str]]:
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
