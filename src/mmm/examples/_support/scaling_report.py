"""What the points of `mmm.examples.scaling` have measured: their records as a table and a picture."""

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

SKIPPED = 2  # rows: the first steps start what is slow to start


class Point(NamedTuple):
    """A run of `ranks` ranks.

    Attributes:
        seconds: of a step, of the slowest rank, the median over the steps. waited: of these, in collectives.
        predicted: seconds of a step; NaN where the machine's rates are not known.
    """

    ranks: int
    layout: str
    global_batch: int
    seconds: float
    waited: float
    predicted: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.global_batch / self.seconds

    @property
    def predicted_rate(self) -> float:
        return self.global_batch / self.predicted


def read_point(ranks: int, line: Sequence[str]) -> Point | None:
    """The record that a command line leaves; None where there is none yet, or one of another line."""
    folder = Path(line[-1])
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        if config["command"] != list(line) or len(config["ranks"]) != ranks or state(folder) != "finished":
            return None
        ds = load(folder).isel(draw=slice(SKIPPED, None))
    except (OSError, ValueError, KeyError, RecordError):
        return None

    if "dt" in ds:
        slowest = ds["dt"].max("rank")
        share = float(ds["dt_own"].mean()) / float(ds["dt"].mean())
    else:  # of many ranks a record has only the largest and the median
        slowest = ds["dt_max"]
        share = float(ds["dt_own_median"].mean()) / float(ds["dt_median"].mean())
    seconds = float(slowest.median())
    predicted = config.get("predicted") or {}
    return Point(
        ranks=ranks,
        layout=config["layout"],
        global_batch=config["global_batch_size"],
        seconds=seconds,
        waited=seconds * (1 - share),
        predicted=predicted.get("step_seconds") or math.nan,
    )


def speed_ups(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Measured and predicted, each over its own first point."""
    first = points[0]
    measured = [first.ranks * point.rate / first.rate for point in points]
    predicted = [first.ranks * point.predicted_rate / first.predicted_rate for point in points]
    return measured, predicted


def table(points: Sequence[Point]) -> str:
    """A line a point."""
    heads = (
        f"{'ranks':>6}{'samples/s':>11}{'speed-up':>10}{'predicted':>11}{'efficiency':>12}{'step, s':>10}{'waited':>8}"
    )
    lines = [f"{heads}   layout, global batch"]
    for point, measured, predicted in zip(points, *speed_ups(points), strict=True):
        line = f"{point.ranks:>6}{point.rate:>11.4g}{measured:>10.2f}{predicted:>11.2f}{measured / point.ranks:>12.0%}"
        line += f"{point.seconds:>10.4f}{point.waited / point.seconds:>8.0%}"
        lines.append(f"{line}   {point.layout}, {point.global_batch}")
    if math.isnan(points[0].predicted):
        lines.append("no prediction: the machine's rates are not known; `mmm machine --measure` finds this one's")
    return "\n".join(lines)


def draw(points: Sequence[Point], title: str, path: Path) -> Path:
    """The speed-up against the ranks, beside what is predicted and ideal; the picture's file."""
    ranks = [point.ranks for point in points]
    measured, predicted = speed_ups(points)
    with style():
        figure = new_figure(6, 4.2)
        axes = figure.subplots()
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
