"""A plot made of characters, for a terminal or a text file."""

import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.series import Series, limits, metrics, outside, series

if TYPE_CHECKING:
    import xarray

SMALL = ("test_acc", "val_loss", "dt", "dtf", "dtb")
WHOLE = ("iter", "epoch", "row", "ranks")  # names of x that have whole numbers
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def terminal_plot(ds: "xarray.Dataset", metric: str, width: int = 100, height: int = 20, color: bool = False) -> str:
    """The metric over the steps in `width` × `height` characters (quarter blocks and box lines; colour if `color`).

    A metric that differs by rank is drawn as the median over ranks. Points outside the axes are named below the plot.

    Raises:
        RecordError: the dataset holds no such metric.
    """
    s = series(ds, metric)
    name = f"{s.title} ({s.label})" if s.title != s.name else s.label
    name += f", median of {s.ranks} ranks" if s.high is not None else ""
    return _plot(s, name, width, height, color)


def _plot(s: Series, name: str, width: int, height: int, color: bool) -> str:
    """The median over the ranks, where they differ."""
    s = s._replace(low=None, high=None)
    shown = limits(s)
    if shown is None:
        return f"{name}: no finite value in {len(s.y)} rows\n"
    below = textwrap.wrap(outside(s, shown), width - 2)
    drawn = plot_by_letters([s], name, shown.low, shown.high, width, height - len(below), color)
    return drawn + "".join(f"  {line}\n" for line in below)


def terminal_summary(ds: "xarray.Dataset", loss: str) -> str:
    """The loss, and small plots of accuracy or validation loss and of where a step's time went."""
    small = [name for name in SMALL if name in metrics(ds)][:4]
    return f"{terminal_plot(ds, loss)}\n{side_by_side(ds, small)}"


def side_by_side(ds: "xarray.Dataset", names: Sequence[str], width: int = 100, height: int = 10) -> str:
    """A small plot of each metric that has a curve, beside each other in `width` characters."""
    drawn = [name for name in names if np.isfinite(series(ds, name).y).sum() > 1]
    each = width // max(len(drawn), 1) - 1
    plots = [_plot(series(ds, name), series(ds, name).label, each, height, False) for name in drawn]
    lines = zip_longest(*(plot.splitlines() for plot in plots), fillvalue="")
    return "".join(" ".join(f"{cell:<{each}}" for cell in line).rstrip() + "\n" for line in lines)


def plot_by_letters(
    curves: Sequence[Series], title: str, low: float, high: float, width: int, height: int, color: bool = False
) -> str:
    """The curves between two values of y in `width` × `height` characters by plotext, each by a letter; one alone as a
    line. Of points that coincide the last is shown."""
    import plotext

    low, high = widened(low, high)
    left = min(float(s.x.min()) for s in curves)
    right = max(float(s.x.max()) for s in curves)
    plotext.terminal.limit(False, False)  # as wide as asked, whatever the terminal
    try:
        figure = plotext.figure
        figure.clear()
        figure.theme("colorless")
        figure.plot_size(width, height)
        for s, letter in zip(curves, LETTERS * len(curves), strict=False):
            inside = np.flatnonzero(np.isfinite(s.y) & (s.y >= low) & (s.y <= high))
            marker: object = "hd"
            if len(curves) > 1:
                inside = inside[:: max(1, len(inside) // width)]
                marker = letter
            elif color:
                marker = plotext.marker(marker, pixel="cyan")
            signal = figure.signal(s.x[inside].tolist(), s.y[inside].tolist(), marker=marker)
            signal.lines(len(curves) == 1 and not s.sparse)
            figure.draw(signal)
        figure.title(title)
        figure.label(curves[0].x_name)
        figure.ruler("x").lim(*((left, right) if right > left else (left - 1, right + 1)))
        figure.ruler("y").lim(low, high)
        figure.ruler("y").ticks(*ticks(low, high, max(2, height // 3)))
        figure.ruler("x").ticks(*ticks(left, right, max(2, width // 14), integer=curves[0].x_name in WHOLE))
        drawn = figure.build().string(not color)
    finally:
        plotext.terminal.limit(True, True)
    drawn = drawn if color else _ESCAPES.sub("", drawn)
    return "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())


def widened(low: float, high: float) -> tuple[float, float]:
    """A range for an axis: of a constant, one around it."""
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return low, high


def ticks(low: float, high: float, most: int, integer: bool = False) -> tuple[list[float], list[str]]:
    """Round values from `low` to `high`, about `most` and at least one, and their labels."""
    if high <= low:
        return [low], [f"{low:g}"]
    rough = (high - low) / most
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    step = max(1.0, step) if integer else step
    places = [n * step for n in range(int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9)) + 1)] or [low]
    size = max(abs(low), abs(high))
    if size >= 1e6 or size < 1e-3:
        digits = max(0, int(np.floor(np.log10(size))) - int(np.floor(np.log10(step))))
        return places, [f"{value:.{digits}e}" for value in places]
    digits = max(0, -int(np.floor(np.log10(step))))
    return places, [f"{value:,.{digits}f}" for value in places]
