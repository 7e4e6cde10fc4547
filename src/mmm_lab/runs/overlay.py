"""One metric of several runs in one plot: by letters in a terminal, by colours in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmm.errors import RecordError
from mmm.history.plots.lines import draw_lines, sentence
from mmm.history.plots.series import LARGEST, Series, limits
from mmm.history.plots.style import new_figure, save, style
from mmm.history.plots.terminal import LETTERS, WHOLE, plot_by_letters, widened
from mmm.history.record.dataset import about
from mmm.history.record.folder import reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmm_lab.runs.runs import Run

MOST = 1e100  # of what is plotted against
LONGEST_NAME = 70  # characters in a legend
STEPS = ("iter", "epoch")
AXES = {"step": "", "tokens": "tokens", "hours": "hours in steps"}


def common_metrics(runs: Sequence[Run]) -> list[str]:
    """What all runs have a number of."""
    names = [name for name in runs[0].rows if name not in ("draw", "iter", "epoch")]
    return [name for name in names if all(np.isfinite(run.rows.get(name, np.nan)).any() for run in runs)]


def overlaid(runs: Sequence[Run], metric: str, by: str = "step") -> list[Series]:
    """The metric of each run, without the rows that lack it.

    Args:
        by: step (iter, else epoch, whichever rises from row to row in all runs, else the row), tokens or hours.

    Raises:
        RecordError: a run lacks the metric, or what `by` needs.
    """
    if metric not in (known := common_metrics(runs)):
        raise RecordError(f"not all of these runs have a {metric!r}. All have: {', '.join(known) or 'nothing'}.")
    steps = next((name for name in STEPS if all(_rises(run.rows.get(name)) for run in runs)), "draw")
    says = about(metric)
    result = []
    for run in runs:
        y = run.rows[metric]
        x = _places(run, by, steps)
        kept = (np.abs(y) < LARGEST) & (np.abs(x) < MOST)  # a damaged record may say anything
        if not kept.any():
            raise RecordError(f"{run.folder}: no row that has {metric} says at which {by} it was.")
        result.append(
            Series(metric, says["long_name"], says.get("units", ""), x[kept], AXES[by] or _said(steps), y[kept])
        )
    return result


def _rises(column: np.ndarray | None) -> bool:
    """Whether it places the rows: in a record of several trainings their steps begin anew."""
    return column is not None and bool((np.diff(column[np.isfinite(column)]) > 0).all())


def _said(steps: str) -> str:
    return "row" if steps == "draw" else steps


def _places(run: Run, by: str, steps: str) -> np.ndarray:
    """(draw,): the x of each row."""
    if by == "step":
        return run.rows[steps]
    needed = "tps" if by == "tokens" else "dt"
    if needed not in run.rows or "dt" not in run.rows:
        raise RecordError(f"{run.folder} has no {needed} in its rows, which --by {by} needs. Leave --by out.")
    return np.cumsum(run.amount("tps") if by == "tokens" else run.seconds / 3600)


def _range(curves: Sequence[Series]) -> tuple[float, float]:
    """Lowest and highest of what is shown of them."""
    shown = [limits(s) for s in curves]
    low = min(each.low for each in shown if each is not None)
    high = max(each.high for each in shown if each is not None)
    return widened(low, high)


def terminal_overlay(curves: Sequence[Series], names: Sequence[str], width: int, height: int) -> str:
    """The curves by letters, and a line a run below: its letter, name and last value."""
    first = curves[0]
    title = f"{first.title} ({first.label})" if first.title != first.name else first.label
    lines = [plot_by_letters(curves, title, *_range(curves), width, height)]
    for s, name, letter in zip(curves, names, LETTERS * len(curves), strict=False):
        place = f"{s.x_name} {s.x[-1]:.15g}" if s.x_name in WHOLE else f"{s.x[-1]:,.4g} {s.x_name}"
        line = f"  {letter} {name}: {s.y[-1]:.6g} at {place}"
        if first.x_name in STEPS and s is not first:
            line += _apart(first, s)
        lines.append(f"{line}\n")
    return "".join(lines)


def _apart(first: Series, s: Series) -> str:
    """How far a run is from the first one, where both have two steps or more: one curve may cover the other."""
    _, mine, others = np.intersect1d(s.x, first.x, return_indices=True)
    if len(mine) < 2:
        return ""
    a, b = first.y[others], s.y[mine]
    largest = np.maximum(np.abs(a), np.abs(b)).max()
    relative = float(np.abs(a - b).max() / largest) if largest > 0 else 0.0
    steps = "epochs" if s.x_name == "epoch" else "steps"
    return f"; {len(mine)} {steps} off {LETTERS[0]} by {relative:.0e} at most"


def overlay_figure(curves: Sequence[Series], names: Sequence[str]) -> Figure:
    """The curves, with the legend below them, in which each name has its place."""
    from matplotlib.ticker import MaxNLocator

    shown = [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]
    columns = max(1, min(4, LONGEST_NAME // (max(map(len, shown)) + 6)))
    lines = -(-len(shown) // columns)
    height = 3.8 + 0.2 * lines
    figure = new_figure(7.2, height)
    figure.subplots_adjust(left=0.125, right=0.97, top=1 - 0.35 / height, bottom=(0.6 + 0.2 * lines) / height)
    axes = figure.add_subplot()
    draw_lines(axes, list(zip(shown, curves, strict=True)))
    low, high = _range(curves)
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    if curves[0].x_name in WHOLE:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(sentence(curves[0].title))
    axes.set_xlabel(curves[0].x_name)
    axes.set_ylabel(curves[0].label)
    figure.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0.115, 0.0), frameon=False)
    return figure


def save_overlay(curves: Sequence[Series], names: Sequence[str], folder: Path, theme: str = "light") -> list[Path]:
    """Write ``<metric>.png`` and ``.svg`` to the folder, and return their paths. RecordError where that fails."""
    paths = [folder / f"{curves[0].name}{suffix}" for suffix in (".png", ".svg")]
    try:
        with style(theme):
            return save(overlay_figure(curves, names), *paths)
    except OSError as error:
        raise RecordError(f"cannot write {paths[0]}: {reason(error)}. Give another folder.") from error
