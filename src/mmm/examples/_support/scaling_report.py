"""What the points of `mmm.examples.scaling` have measured: their records as a table, a dataset, a picture."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.errors import RecordError
from mmm.history.plots.series import PART_NAMES, PARTS
from mmm.history.plots.style import new_figure, save, style, theme
from mmm.history.record.dataset import Columns, write_dataset
from mmm.history.record.reader import load, state
from mmm.palette import BLUE, ORANGE, PURPLE, STEP_PARTS

SKIPPED = 2  # rows: the first steps start what is slow to start


class Point(NamedTuple):
    """A run of `ranks` ranks.

    Attributes:
        seconds: of a step, of the slowest rank, the median over the steps.
        parts: of these seconds, as all ranks' steps have them on average. waited: of these, in collectives.
        predicted: seconds of a step, and by what machine's rates; None where they are not known.
    """

    ranks: int
    layout: str
    global_batch: int
    seconds: float
    parts: dict[str, float]
    waited: float
    predicted: float | None
    machine: str

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.global_batch / self.seconds

    @property
    def predicted_rate(self) -> float:
        return self.global_batch / self.predicted if self.predicted else np.nan


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

    slowest = ds["dt"].max("rank") if "dt" in ds else ds["dt_max"]  # of many ranks a record has these alone
    step = float(slowest.median())
    names = [part for part in (*PARTS, "dt", "dt_own") if part in ds or f"{part}_median" in ds]
    mean = {name: float((ds[name] if name in ds else ds[f"{name}_median"]).mean()) for name in names}
    predicted = config.get("predicted") or {}
    return Point(
        ranks=ranks,
        layout=config["layout"],
        global_batch=config["global_batch_size"],
        seconds=step,
        parts={part: step * mean[part] / mean["dt"] for part in PARTS if part in mean},
        waited=step * max(1 - mean.get("dt_own", mean["dt"]) / mean["dt"], 0.0),
        predicted=predicted.get("step_seconds"),
        machine=predicted.get("machine") or "",
    )


def speed_ups(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Measured and predicted, each over its own first point."""
    first = points[0].ranks
    rates = np.array([(point.rate, point.predicted_rate) for point in points]).T
    return first * rates[0] / rates[0, 0], first * rates[1] / rates[1, 0]


def table(points: Sequence[Point]) -> str:
    """A line a point."""
    heads = f"{'ranks':>6}{'samples/s':>11}{'speed-up':>10}{'predicted':>11}{'efficiency':>12}{'predicted':>11}"
    heads += f"{'step, s':>10}" + "".join(f"{PART_NAMES[part]:>11}" for part in points[0].parts)
    lines = [f"{heads}{'in collectives':>16}   layout, global batch"]
    for point, up, foreseen in zip(points, *speed_ups(points), strict=True):
        text = f"{point.ranks:>6}{point.rate:>11.4g}{up:>10.2f}{_or_dash(foreseen, '.2f'):>11}"
        text += f"{up / point.ranks:>12.0%}{_or_dash(foreseen / point.ranks, '.0%'):>11}{point.seconds:>10.4f}"
        text += "".join(f"{seconds / point.seconds:>11.0%}" for seconds in point.parts.values())
        lines.append(f"{text}{point.waited / point.seconds:>16.0%}   {point.layout}, {point.global_batch}")
    if not points[0].predicted:
        lines.append("no prediction: the machine's rates are not known; `mmm machine --measure` finds this one's")
    return "\n".join(lines)


def _or_dash(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def write_report(points: Sequence[Point], kind: str, program: str, folder: Path) -> list[Path]:
    """The dataset (xarray, one entry a point) and the picture; the files."""
    measured, predicted = speed_ups(points)
    variables: dict[str, tuple[Any, ...]] = {
        "rate": ("point", np.array([point.rate for point in points]), {"units": "samples/s"}),
        "seconds": ("point", np.array([point.seconds for point in points]), {"units": "s"}),
        "predicted_seconds": ("point", np.array([point.predicted or np.nan for point in points]), {"units": "s"}),
        "speed_up": ("point", measured, {"long_name": "ranks of the first point · rate / its rate"}),
        "predicted_speed_up": ("point", predicted, {}),
        "waited": (
            "point",
            np.array([point.waited for point in points]),
            {"units": "s", "long_name": "in collectives"},
        ),
        **{
            part: ("point", np.array([point.parts[part] for point in points]), {"units": "s"})
            for part in points[0].parts
        },
    }
    coordinates: dict[str, tuple[Any, ...]] = {
        "ranks": ("point", np.array([point.ranks for point in points])),
        "layout": ("point", np.array([point.layout for point in points])),
        "global_batch": ("point", np.array([point.global_batch for point in points])),
    }
    path = folder / f"{kind}.h5"
    write_dataset(Columns(variables, coordinates, {"scaling": kind, "program": program}), path)
    with style():
        return [path, *save(picture(points, kind, program), folder / f"{kind}.png", folder / f"{kind}.svg")]


def picture(points: Sequence[Point], kind: str, program: str) -> Any:
    """Speed-up, efficiency, and the parts of a step, beside each other."""
    ranks, (measured, predicted) = np.array([point.ranks for point in points]), speed_ups(points)
    figure = new_figure(13, 4.2)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.13, top=0.82, wspace=0.22)
    above, efficiency, parts = figure.subplots(1, 3)
    foreseen = f"predicted ({points[0].machine})"
    for axes, over in ((above, 1), (efficiency, ranks)):
        axes.plot(ranks, ranks / over, color=theme().muted, linestyle="--", label="ideal")
        if not np.isnan(predicted).any():
            axes.plot(ranks, predicted / over, color=ORANGE, marker="s", markersize=9, label=foreseen)
        axes.plot(ranks, measured / over, color=BLUE, marker="o", label="measured")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
        axes.set_xlabel("ranks")
    above.set_yscale("log", base=2)  # where the ideal is a line
    shown = np.log2([np.nanmin([measured, predicted]), np.nanmax([measured, predicted, ranks])])
    ticks = [2.0**power for power in range(int(np.floor(shown[0])), int(np.ceil(shown[1])) + 1)]
    above.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    for axes in (above, efficiency):
        axes.minorticks_off()
    efficiency.set_ylim(0, None)
    above.set_title("speed-up")
    above.legend(loc="upper left")
    efficiency.set_title("efficiency")
    efficiency.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _draw_parts(parts, points)
    batch = "the global batch stays" if kind == "strong" else "a rank's batch stays"
    figure.suptitle(f"{kind} scaling of {shlex.quote(program)}: {batch}", x=0.05, ha="left", fontweight="bold")
    return figure


def _draw_parts(axes: Any, points: Sequence[Point]) -> None:
    """Bars of a step's parts, and beside each what of it a rank was in collectives."""
    bottom, places = np.zeros(len(points)), np.arange(len(points))
    for part in points[0].parts:
        height = np.array([point.parts[part] for point in points]) * 1e3
        axes.bar(places - 0.13, height, 0.5, bottom, color=STEP_PARTS[part], label=PART_NAMES[part])
        bottom += height
    waited = [point.waited * 1e3 for point in points]
    axes.bar(places + 0.27, waited, 0.2, color=PURPLE, label="in collectives")
    axes.set_xticks(places, [f"{point.ranks:,}" for point in points])
    axes.set_ylim(0, 1.45 * max(bottom))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms a step")
    axes.set_title("where the time went")
    axes.legend(loc="upper left", ncols=2)
