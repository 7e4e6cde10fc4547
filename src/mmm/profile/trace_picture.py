"""A picture of a trace file of many ranks: one step, and a part of it from close by.

``python -m mmm.profile.trace_picture TRACE PICTURE``: a run with --profile draws it by a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.history.plots.series import PART_NAMES
from mmm.history.plots.style import new_figure, save, style, text_on, theme
from mmm.palette import GREEN, PURPLE, STEP_PARTS
from mmm.profile.rank_trace import CALLS, STEPS
from mmm.profile.trace_file import OURS, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {**STEP_PARTS, "collective": PURPLE, "wait": "#ead1df", "send": GREEN, "recv": GREEN}
NAMES = {
    **PART_NAMES,
    "dtw": "waiting for another stage",
    "collective": "collective called",
    "wait": "waiting for a call",
    "send": "send, recv called",
}
MOST_RANKS = 32
CLOSE = 0.16  # of the step


@dataclass
class _Row:
    """Of a rank: its name, and its slices as (kind, name, begin, end), in ms."""

    name: str = ""
    slices: list[tuple[str, str, float, float]] = field(default_factory=list)


def draw_trace(path: Path, picture: Path) -> Path:
    """Draw the step in the middle of a trace of `TraceFile`, of its first ranks, as PNG. Returns `picture`.

    Raises:
        ValueError: the trace has no step. OSError: a file cannot be read, or written.
    """
    rows, arrows = _read(path)
    shown = dict(sorted(rows.items())[:MOST_RANKS])
    with style():
        save(_figure(shown, arrows, len(rows)), picture)
    return picture


def _read(path: Path) -> tuple[dict[int, _Row], dict[int, list[dict[str, Any]]]]:
    rows: dict[int, _Row] = {}
    arrows: dict[int, list[dict[str, Any]]] = {}
    tracks: dict[int, str] = {}
    for event in read_trace(path):
        row = rows.setdefault(event["pid"], _Row())
        if event["name"] == "process_name":
            row.name = event["args"]["name"]
        elif event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and tracks[event["tid"]].startswith((STEPS, CALLS)):
            begin = event["ts"] / 1e3
            kind = event["cat"].removeprefix(f"{OURS},")
            row.slices.append((kind, event["name"], begin, begin + event["dur"] / 1e3))
        elif event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    return rows, arrows


def _figure(rows: dict[int, _Row], arrows: dict[int, list[dict[str, Any]]], ranks: int) -> Any:
    """Args:
    rows: of the ranks that are shown. ranks: that the trace has.
    """
    from matplotlib.patches import Patch

    steps = [span for span in next(iter(rows.values())).slices if span[0] == "step"] if rows else []
    if not steps:
        raise ValueError("no step in the trace")
    _, name, begin, end = steps[len(steps) // 2]
    height = 0.46 * len(rows) + 0.7
    figure = new_figure(13, 2 * height + 0.7)
    both = figure.subplots(2, 1)
    left, tall = 0.012 + 0.0066 * max(len(row.name) for row in rows.values()), 2 * height + 0.7
    figure.subplots_adjust(left=left, right=0.985, bottom=0.5 / tall, top=1 - 0.75 / tall, hspace=0.9 / height)
    first = min(
        (b for row in rows.values() for kind, _, b, _ in row.slices if kind == "collective" and b > begin),
        default=begin,
    )
    close = (begin, first + CLOSE * (end - begin))
    _draw(both[0], rows, arrows, (begin, end), begin, "send")
    some = f"{name}, the first {len(rows)} of {ranks} ranks" if len(rows) < ranks else name
    both[0].set_title(f"{some}: upper half of a row the parts of the step, lower half communication", fontsize=10.5)
    both[0].axvspan(close[0] - begin, close[1] - begin, color=theme().muted, alpha=0.13, linewidth=0, zorder=0)
    _draw(both[1], rows, arrows, close, begin, "collective")
    both[1].set_title(
        "the shaded part; each line joins the calls of one collective, from the first rank to the last", fontsize=10.5
    )
    both[1].set_xlabel("ms from the beginning of the step", color=theme().muted)
    used = {kind for row in rows.values() for kind, *_ in row.slices}
    handles = [Patch(color=COLORS[kind], label=label) for kind, label in NAMES.items() if kind in used]
    figure.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper left",
        bbox_to_anchor=(0.005, 1.0),
        fontsize=8.5,
        handlelength=1.1,
        columnspacing=1.1,
    )
    return figure


def _draw(
    axes: Axes,
    rows: dict[int, _Row],
    arrows: dict[int, list[dict[str, Any]]],
    window: tuple[float, float],
    zero: float,
    joined: str,
) -> None:
    low, high = window
    places = {rank: place for place, rank in enumerate(rows)}
    points = axes.get_window_extent().width * 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    for rank, row in rows.items():
        for kind in COLORS:
            shown = [each for each in row.slices if each[0] == kind and each[3] > low and each[2] < high]
            part = kind in STEP_PARTS
            place = places[rank] + (-0.42 if part else 0.06)
            bars = [(begin - zero, end - begin) for _, _, begin, end in shown]
            axes.broken_barh(bars, (place, 0.46 if part else 0.32), facecolors=COLORS[kind], linewidth=0, zorder=2)
            for _, name, begin, end in shown if part else ():
                left, right = max(begin, low), min(end, high)
                text = _short(name, (right - left) / (high - low) * points)
                look = {"ha": "center", "va": "center", "fontsize": 7.5, "color": text_on(COLORS[kind]), "zorder": 4}
                axes.text((left + right) / 2 - zero, place + 0.23, text, **look)  # type: ignore[arg-type]
    for ends in arrows.values():
        inside = [end for end in ends if end["pid"] in places and low <= end["ts"] / 1e3 <= high]
        if len(inside) == len(ends) and ends[0]["name"] == joined:
            points_of = [(end["ts"] / 1e3 - zero, places[end["pid"]] + 0.22) for end in ends]
            color = COLORS[joined]
            line = {"arrowstyle": "-|>", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
            for start, stop in pairwise(points_of):
                axes.annotate("", stop, start, arrowprops={**line, "mutation_scale": 7}, zorder=5)
    axes.set_xlim(low - zero, high - zero)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows.values()])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _short(name: str, points: float) -> str:
    """As much of a slice's name as there is room for."""
    parts: Sequence[str] = name.split()
    for text in (name, parts[-1]):
        if 4.9 * len(text) + 2 < points:
            return text
    return ""


def main(argv: Sequence[str]) -> int:
    """Draw. Returns 0; 1 where that cannot be done."""
    try:
        draw_trace(Path(argv[0]), Path(argv[1]))
    except Exception as error:  # whatever is wrong with it, the run is over and well
        print(f"no picture of the trace: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
