"""Reads the records of the points of `mmm.examples.scaling`, and shows them as a table and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mmm.errors import RecordError
from mmm.history.plots.style import new_figure, save, style
from mmm.history.record.reader import load, state
from mmm.palette import BLUE, LIGHT, ORANGE

# Rows that do not count: the first steps include warm-up.
SKIPPED = 2


class Point(NamedTuple):
    """What a run on some number of ranks has measured.

    Attributes:
        ranks: number of ranks.
        layout: the layout as a word, such as dp4.
        global_batch: number of samples in the global batch.
        seconds: seconds per step of the slowest rank, the median over the steps.
        waited: how many of these seconds a rank spent in collectives.
        predicted: predicted seconds per step; NaN if the machine's rates are not known.
    """

    ranks: int
    layout: str
    global_batch: int
    seconds: float
    waited: float
    predicted: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.global_batch / self.seconds

    @property
    def predicted_rate(self) -> float:
        return self.global_batch / self.predicted


def read_point(ranks: int, line: Sequence[str]) -> Point | None:
    """Read the record that a command line has left.

    Returns:
        The point, or None if there is no finished record yet, or the record of another command.
    """
    # The last word of a point's line is its folder.
    folder = Path(line[-1])
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        same_run = config["command"] == list(line) and len(config["ranks"]) == ranks
        if not same_run or state(folder) != "finished":
            return None
        ds = load(folder).isel(draw=slice(SKIPPED, None))
    except (OSError, ValueError, KeyError, RecordError):
        return None

    # dt is (steps, ranks). For many ranks a record has only the largest and the median of them, (steps,).
    if "dt" in ds:
        slowest = ds["dt"].max("rank")
        own_seconds = ds["dt_own"]
        all_seconds = ds["dt"]
    else:
        slowest = ds["dt_max"]
        own_seconds = ds["dt_own_median"]
        all_seconds = ds["dt_median"]
    own_share = float(own_seconds.mean()) / float(all_seconds.mean())
    seconds = float(slowest.median())
    predicted = config.get("predicted") or {}
    return Point(
        ranks=ranks,
        layout=config["layout"],
        global_batch=config["global_batch_size"],
        seconds=seconds,
        waited=seconds * (1 - own_share),
        predicted=predicted.get("step_seconds") or math.nan,
    )


def speed_ups(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The measured and the predicted speed-up of each point, each relative to its own first point."""
    first = points[0]
    measured = []
    predicted = []
    for point in points:
        measured.append(first.ranks * point.rate / first.rate)
        predicted.append(first.ranks * point.predicted_rate / first.predicted_rate)
    return measured, predicted


def table(points: Sequence[Point]) -> str:
    """The table: a line per point."""
    lines = [
        " ranks  samples/s  speed-up  predicted  efficiency   step, s  waited   layout, global batch",
    ]
    for point, measured, predicted in zip(points, *speed_ups(points), strict=True):
        efficiency = measured / point.ranks
        waited_share = point.waited / point.seconds
        cells = [
            f"{point.ranks:>6}",
            f"{point.rate:>11.4g}",
            f"{measured:>10.2f}",
            f"{predicted:>11.2f}",
            f"{efficiency:>12.0%}",
            f"{point.seconds:>10.4f}",
            f"{waited_share:>8.0%}",
            f"   {point.layout}, {point.global_batch}",
        ]
        lines.append("".join(cells))
    if math.isnan(points[0].predicted):
        lines.append("no prediction: the machine's rates are not known; `mmm machine --measure` finds this one's")
    return "\n".join(lines)


def draw(points: Sequence[Point], title: str, path: Path) -> Path:
    """Draw the speed-up over the number of ranks, with the prediction and the ideal. Returns the picture's file."""
    ranks = [point.ranks for point in points]
    measured, predicted = speed_ups(points)
    with style():
        figure = new_figure(6, 4.2)
        axes = figure.subplots()
        # Ideally n ranks are n times as fast as one.
        axes.plot(ranks, ranks, color=LIGHT.muted, linestyle="--", label="ideal")
        if not math.isnan(points[0].predicted):
            axes.plot(ranks, predicted, color=ORANGE, marker="s", label="predicted")
        axes.plot(ranks, measured, color=BLUE, marker="o", label="measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_ylabel("speed-up")
        axes.set_title(title)
        axes.legend()
        save(figure, path)
    return path
