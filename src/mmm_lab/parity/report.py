"""The verdict on each layout, and what is left of it: a table, JSON, a dataset, a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mmm.comparison import relative_error, worst
from mmm.history.plots.style import new_figure, save, style, theme
from mmm.history.record.dataset import Columns, plain_attrs, write_dataset
from mmm.history.record.folder import cannot_write, write_atomically
from mmm.palette import BLUE, VERMILION
from mmm_lab.parity.layouts import ParityCase
from mmm_lab.parity.reference import Reference, Training
from mmm_lab.parity.train import Curve

LOSS_LIMIT = {"fp64": 1e-9, "fp32": 1e-4}  # relative
GRADIENT_LIMIT = {"fp64": 1e-8, "fp32": 1e-3}  # of the largest element of the parameter's gradient
JSON, DATASET, PICTURE, ERRORS = "parity.json", "parity.h5", "curves", "errors.txt"
NO_DIFFERENCE = 1e-17  # where a curve of differences that are 0 is drawn on a logarithmic axis
NOT_IN_JSON = ("losses", "expected_losses", "axes")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One training of a model on a layout, against the reference.

    Attributes:
        max_rel_loss_diff: the largest |l - l₀| / |l₀| of all steps. max_grad_diff: the largest max|g - g₀| / max|g₀| of
            all parameters and ranks, at step 1. None where the ranks failed.
        reason: why it did not pass; empty where it did. seconds: of training, without starting the ranks.
        sent, expected: bytes of a step, of the rank that sends most: counted, and what the layout needs at least.
        losses, expected_losses: of each step, here and by the reference; empty where the ranks failed.
    """

    layout: str
    ranks: int
    max_rel_loss_diff: float | None
    max_grad_diff: float | None
    passed: bool
    model: str
    technique: str
    optimizer: str
    steps: int
    seconds: float | None = None
    reason: str = ""
    sent: int | None = None
    expected: int | None = None
    losses: list[float] = field(default_factory=list)
    expected_losses: list[float] = field(default_factory=list)
    axes: dict[str, int] = field(default_factory=dict)

    @property
    def result(self) -> str:
        return "pass" if self.passed else "FAIL" if self.losses else "error"


def evaluate(
    case: ParityCase, optimizer: str, training: Training, expected: Reference, curves: Sequence[Curve]
) -> Comparison:
    """What every rank found, against the limits of the dtype. A number that is not finite does not pass."""
    loss_limit, gradient_limit = LOSS_LIMIT[training.dtype], GRADIENT_LIMIT[training.dtype]
    wrong = []
    loss_diff, step = worst(
        (
            (relative_error(got, wanted), step)
            for curve in curves
            for step, (got, wanted) in enumerate(zip(curve.losses, expected.losses, strict=True))
        ),
        key=itemgetter(0),
    )
    if not loss_diff <= loss_limit:
        wrong.append(f"the loss of step {step + 1} differs by {loss_diff:.1e}, more than {loss_limit:.0e}")
    compared = set().union(*(curve.differences for curve in curves))
    if missing := sorted(expected.gradients.keys() - compared):
        wrong.append(f"no rank has {len(missing)} of the parameters ({missing[0]} first)")
    grad_diff, rank, name = worst(
        ((off, rank, name) for rank, curve in enumerate(curves) for name, off in curve.differences.items()),
        key=itemgetter(0),
    )
    if not grad_diff <= gradient_limit:
        off_limit = {name for curve in curves for name, off in curve.differences.items() if not off <= gradient_limit}
        among = f"worst of {len(off_limit)} wrong: " if len(off_limit) > 1 else ""
        by = f"differs by {grad_diff:.1e}, more than {gradient_limit:.0e}"
        wrong.append(f"{among}the gradient of {name} on rank {rank} {by}")
    busiest = max(curves, key=lambda curve: curve.sent or 0)
    return Comparison(
        **_about(case, optimizer, training),
        max_rel_loss_diff=loss_diff,
        max_grad_diff=grad_diff,
        passed=not wrong,
        seconds=max(curve.seconds for curve in curves),
        reason="; ".join(wrong),
        losses=curves[0].losses,
        expected_losses=expected.losses,
        sent=busiest.sent,
        expected=None if busiest.expected is None else round(busiest.expected),
    )


def failed(case: ParityCase, optimizer: str, training: Training, reason: str) -> Comparison:
    """A layout whose ranks gave no answer."""
    return Comparison(
        **_about(case, optimizer, training), max_rel_loss_diff=None, max_grad_diff=None, passed=False, reason=reason
    )


def _about(case: ParityCase, optimizer: str, training: Training) -> dict[str, Any]:
    return {
        "layout": case.layout,
        "ranks": case.ranks,
        "model": case.model,
        "technique": case.technique,
        "optimizer": optimizer,
        "steps": training.steps,
        "axes": case.sizes,
    }


def table(rows: Sequence[Comparison], width: int = 150) -> str:
    """One line a training; below it, why those that did not pass did not."""
    columns = Table(box=None, pad_edge=False)
    for heading in ("model", "layout", "ranks", "technique", "optimizer", "loss", "gradient", "sent", "least", "s", ""):
        right = heading in ("ranks", "loss", "gradient", "sent", "least", "s")
        columns.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        sent, least = ("" if count is None else f"{count:,}" for count in (row.sent, row.expected))
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        columns.add_row(
            row.model,
            row.layout,
            str(row.ranks),
            row.technique,
            row.optimizer,
            _short(row.max_rel_loss_diff),
            _short(row.max_grad_diff),
            sent,
            least,
            seconds,
            row.result,
        )
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(columns)
    lines = [line.rstrip() for line in capture.get().rstrip().splitlines()]
    lines += [
        f"{row.result}: {row.model} {row.layout} {row.technique} {row.optimizer}: {row.reason}"
        for row in rows
        if not row.passed
    ]
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def json_rows(rows: Sequence[Comparison]) -> bytes:
    """A list of mappings; what is no finite number is null."""
    plain = []
    for row in rows:
        values = {key: value for key, value in asdict(row).items() if key not in NOT_IN_JSON}
        plain.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()})
    return (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(rows: Sequence[Comparison], folder: Path, name: str = JSON) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder / name, error) from None
    write_atomically(folder / name, json_rows(rows))
    return folder / name


def dataset(rows: Sequence[Comparison], training: Training, attrs: Mapping[str, Any]) -> Columns:
    """The table and the curves: dimensions ``case`` and ``step``; each axis' size as a coordinate ``axis_<name>``."""

    def curves(name: str) -> np.ndarray:
        return np.array([getattr(row, name) or [math.nan] * training.steps for row in rows])

    def column(name: str) -> np.ndarray:
        return np.array([math.nan if getattr(row, name) is None else getattr(row, name) for row in rows], dtype=float)

    variables: dict[str, tuple[Any, ...]] = {
        "loss": (("case", "step"), curves("losses"), {"long_name": "training loss"}),
        "reference_loss": (("case", "step"), curves("expected_losses"), {"long_name": "training loss on one device"}),
        "max_rel_loss_diff": ("case", column("max_rel_loss_diff"), {"long_name": "largest relative loss difference"}),
        "max_grad_diff": (
            "case",
            column("max_grad_diff"),
            {"long_name": "largest gradient difference at step 1, over the gradient's largest element"},
        ),
        "passed": ("case", np.array([int(row.passed) for row in rows])),
        "seconds": ("case", column("seconds"), {"long_name": "time of training", "units": "s"}),
        "ranks": ("case", np.array([row.ranks for row in rows])),
        "sent": ("case", column("sent"), {"long_name": "sent in a step by the rank that sends most", "units": "bytes"}),
        "expected": ("case", column("expected"), {"long_name": "least that the layout needs", "units": "bytes"}),
    }
    names = ("model", "layout", "technique", "optimizer", "reason")
    coordinates: dict[str, Any] = {name: ("case", np.array([getattr(row, name) for row in rows])) for name in names}
    axes = dict.fromkeys(axis for row in rows for axis in row.axes)
    coordinates |= {f"axis_{axis}": ("case", np.array([row.axes.get(axis, 1) for row in rows])) for axis in axes}
    coordinates["step"] = ("step", np.arange(1, training.steps + 1))
    return Columns(variables, coordinates, plain_attrs({**asdict(training), **attrs}))


def picture(rows: Sequence[Comparison], training: Training) -> Any:
    """All curves of a model on top of each other, and below how far they are from the reference: a column a model.

    Returns:
        A matplotlib figure; None where no training came to an end.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = [row for row in rows if row.losses]
    models = list(dict.fromkeys(row.model for row in drawn))
    optimizers = list(dict.fromkeys(row.optimizer for row in drawn))
    if not drawn:
        return None
    width, height = 1.3 + 3.8 * max(len(models), 2), 1.3 + 4.2 * len(optimizers)
    figure = new_figure(width, height)
    figure.subplots_adjust(
        left=0.85 / width, right=1 - 0.2 / width, bottom=0.55 / height, top=1 - 0.95 / height, wspace=0.22, hspace=0.28
    )
    grid = figure.subplots(2 * len(optimizers), len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        for index, optimizer in enumerate(optimizers):
            above, below = grid[2 * index][column], grid[2 * index + 1][column]
            some = [row for row in drawn if (row.model, row.optimizer) == (model, optimizer)]
            above.set_title(f"{model}, {optimizer}: {len(some)} layout{'s' * (len(some) != 1)}")
            if not some:
                continue
            _draw_curves(above, below, some, training)
            if column == 0:
                above.set_ylabel("loss")
                below.set_ylabel("relative difference")
            above.tick_params(labelbottom=False)
    _add_texts(figure, width, height)
    for axes in grid[-1]:
        axes.set_xlabel("step (no difference is drawn at 1e-17)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_curves(above: Any, below: Any, rows: Sequence[Comparison], training: Training) -> None:
    """The losses of rows of one model and optimizer, and below how far they are from the reference, with the limit."""
    steps = np.arange(1, training.steps + 1)
    above.plot(steps, rows[0].expected_losses, color=theme().grid, lw=7)
    for row in rows:
        color = BLUE if row.passed else VERMILION
        above.plot(steps, row.losses, color=color, lw=0.8)
        off = np.abs(np.array(row.losses) / np.array(row.expected_losses) - 1)
        below.plot(steps, np.maximum(off, NO_DIFFERENCE), ".-", ms=3, lw=0.6, alpha=0.5, color=color)
    limit = LOSS_LIMIT[training.dtype]
    below.axhline(limit, color=theme().ink, lw=1, ls="--")
    below.annotate(
        f"limit {limit:.0e}",
        (0.99, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    below.set_yscale("log")
    below.set_ylim(NO_DIFFERENCE / 2, max(limit * 10, below.get_ylim()[1]))


def _add_texts(figure: Any, width: float, height: float) -> None:
    """Title and legend. width, height: of the figure, in inches."""
    from matplotlib.lines import Line2D

    lines = {
        "plain PyTorch, one device": Line2D([], [], color=theme().grid, lw=7),
        "each layout, on top of each other": Line2D([], [], color=BLUE, lw=0.8),
        "a layout that fails": Line2D([], [], color=VERMILION, lw=0.8),
    }
    anchor = (0.75 / width, 1 - 0.36 / height)
    figure.legend(lines.values(), lines.keys(), ncols=3, loc="upper left", bbox_to_anchor=anchor, borderpad=0)
    figure.text(
        0.85 / width,
        1 - 0.12 / height,
        "Training loss on every layout, and how far it is from one device",
        fontsize=13,
        fontweight="bold",
        va="top",
    )


def write(
    rows: Sequence[Comparison], training: Training, folder: Path, plots: bool, attrs: Mapping[str, Any]
) -> list[Path]:
    """The record of all rows: JSON, dataset and, with `plots`, the picture; the paths that were written."""
    written = [write_json(rows, folder)]
    if rows:
        write_dataset(dataset(rows, training, attrs), folder / DATASET)
        written.append(folder / DATASET)
    with style():
        if plots and (figure := picture(rows, training)) is not None:
            written += save(figure, folder / f"{PICTURE}.png", folder / f"{PICTURE}.svg")
    return written
