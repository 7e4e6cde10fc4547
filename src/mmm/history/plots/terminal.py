"""A plot made of characters, for a terminal or a text file."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmm.history.plots.series import AxisLimits, Series, limits, outside, restarts, series

if TYPE_CHECKING:
    import xarray

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
    return _plot(s, restarts(ds), name, width, height, color)


def _plot(s: Series, begins: np.ndarray, name: str, width: int, height: int, color: bool) -> str:
    """The median over the ranks, where they differ.

    Args:
        begins: the x at which another training begins, of `restarts`.
    """
    s = s._replace(low=None, high=None)
    shown = limits(s)
    if shown is None:
        return f"{name}: no finite value in {len(s.y)} rows\n"
    note = outside(s, shown)
    drawn = _draw(s, begins, shown, name, width, height - bool(note), color)
    return plain(drawn, color) + (f"  {note}\n" if note else "")


def side_by_side(ds: "xarray.Dataset", metrics: Sequence[str], width: int = 100, height: int = 10) -> str:
    """A small plot of each metric that has a curve, beside each other in `width` characters."""
    curves = [s for metric in metrics if np.isfinite((s := series(ds, metric)).y).sum() > 1]
    each = width // max(len(curves), 1) - 1
    columns = [_plot(s, restarts(ds), s.label, each, height, False).splitlines() for s in curves]
    lines = zip_longest(*columns, fillvalue="")
    return "".join(" ".join(f"{cell:<{each}}" for cell in line).rstrip() + "\n" for line in lines)


def plain(drawn: str, color: bool = False) -> str:
    """`drawn` without trailing spaces, and without colour unless `color`."""
    return "\n".join(line.rstrip() for line in (drawn if color else _ESCAPES.sub("", drawn)).splitlines()) + "\n"


def _draw(s: Series, begins: np.ndarray, shown: AxisLimits, title: str, width: int, height: int, color: bool) -> str:
    inside = np.isfinite(s.y) & ~shown.above & ~shown.below
    x, y = s.x[inside], s.y[inside]
    bottom, top = shown.low, shown.high
    if top - bottom <= 1e-9 * max(abs(top), abs(bottom)):  # a constant: plotext needs a range
        bottom, top = bottom - 0.5 * (abs(bottom) or 1), top + 0.5 * (abs(top) or 1)
    x_ticks = ticks(float(x[0]), float(x[-1]), max(2, width // 14), integer=True)
    trainings = [each for each in np.split(np.arange(len(x)), np.searchsorted(x, begins)) if len(each)]
    signals = [ChartSeries(x[each].tolist(), y[each].tolist(), "hd", not s.sparse) for each in trainings]
    axes = ChartAxes(title, s.x_name, x_ticks, None, ticks(bottom, top, max(2, height // 3)), (bottom, top))
    return chart(signals, axes, width, height, color)


class ChartSeries(NamedTuple):
    """`marker`: a character, or a name of plotext's. `connected`: by lines."""

    x: list[float]
    y: list[float]
    marker: str
    connected: bool


class ChartAxes(NamedTuple):
    """Ticks: places and labels. Limits: lowest and highest; None for those of the data."""

    title: str
    x_name: str
    x_ticks: tuple[list[float], list[str]]
    x_limits: tuple[float, float] | None
    y_ticks: tuple[list[float], list[str]]
    y_limits: tuple[float, float]


def chart(signals: Sequence[ChartSeries], axes: ChartAxes, width: int, height: int, color: bool = False) -> str:
    """`width` × `height` characters by plotext."""
    import plotext

    plotext.terminal.limit(False, False)  # as wide as asked, whatever the terminal
    try:
        figure = plotext.figure
        figure.clear()
        figure.theme("colorless")
        figure.plot_size(width, height)
        for s in signals:
            signal = figure.signal(s.x, s.y, marker=plotext.marker(s.marker, pixel="cyan") if color else s.marker)
            signal.lines(s.connected)
            figure.draw(signal)
        figure.title(axes.title)
        figure.label(axes.x_name)
        if axes.x_limits:
            figure.ruler("x").lim(*axes.x_limits)
        figure.ruler("y").lim(*axes.y_limits)
        figure.ruler("y").ticks(*axes.y_ticks)
        figure.ruler("x").ticks(*axes.x_ticks)
        return figure.build().string(not color)
    finally:
        plotext.terminal.limit(True, True)


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
