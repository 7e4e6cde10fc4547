"""The verdict on each layout, and what remains of it: a table, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from mmm.comparison import relative_error, worst
from mmm.history.record.folder import write_atomically
from mmm_lab.columns import in_columns
from mmm_lab.parity.layouts import ParityCase
from mmm_lab.parity.reference import Reference, Training
from mmm_lab.parity.train import Curve

LOSS_LIMIT = {"fp64": 1e-9, "fp32": 1e-4}  # relative
GRADIENT_LIMIT = {"fp64": 1e-8, "fp32": 1e-3}  # relative to the largest element of the parameter's gradient
JSON = "parity.json"
ERRORS = "errors.txt"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One training of a model on a layout, compared with the reference.

    Attributes:
        max_rel_loss_diff: the largest |l - l₀| / |l₀| of all steps. None where the ranks failed.
        max_grad_diff: the largest max|g - g₀| / max|g₀| of all parameters and ranks, at step 1. None where they failed.
        seconds: seconds of training, without starting the ranks.
        reason: why it did not pass; empty where it did.
        sent: bytes that a step sends, counted on the rank that sends most.
        expected: bytes that the layout has to send at least, on the same rank.
        losses: loss of each step; empty where the ranks failed.
        expected_losses: the same by the reference.
    """

    layout: str
    ranks: int
    max_rel_loss_diff: float | None = None
    max_grad_diff: float | None = None
    passed: bool = False
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

    @property
    def result(self) -> str:
        if self.passed:
            return "pass"
        if self.losses:
            return "FAIL"
        return "error"


def comparison(case: ParityCase, optimizer: str, training: Training, **results: Any) -> Comparison:
    """Make the row of a training. Without `results`, but with a reason, its ranks gave no answer."""
    return Comparison(
        layout=case.layout,
        ranks=case.ranks,
        model=case.model,
        technique=case.technique,
        optimizer=optimizer,
        steps=training.steps,
        **results,
    )


def evaluate(
    case: ParityCase, optimizer: str, training: Training, expected: Reference, curves: Sequence[Curve]
) -> Comparison:
    """Compare what every rank found with the reference. A number that is not finite does not pass.

    Args:
        curves: those of all ranks, in their order.
    """
    # Comparisons below are written so that NaN fails them.
    loss_limit = LOSS_LIMIT[training.dtype]
    gradient_limit = GRADIENT_LIMIT[training.dtype]
    reasons = []
    loss_errors = []
    for curve in curves:
        pairs = zip(curve.losses, expected.losses, strict=True)
        for step, (loss, expected_loss) in enumerate(pairs, 1):
            loss_errors.append((relative_error(loss, expected_loss), step))
    loss_diff, step = worst(loss_errors, key=itemgetter(0))
    if not loss_diff <= loss_limit:
        reasons.append(f"the loss of step {step} differs by {loss_diff:.1e}, more than {loss_limit:.0e}")
    gradient_errors = []
    for rank, curve in enumerate(curves):
        for name, difference in curve.differences.items():
            gradient_errors.append((difference, rank, name))
    # Each rank has the parameters of its pipeline stages; together they have all.
    compared = {name for _, _, name in gradient_errors}
    missing = sorted(expected.gradients.keys() - compared)
    if missing:
        reasons.append(f"no rank has {len(missing)} of the parameters ({missing[0]} first)")
    grad_diff, rank, name = worst(gradient_errors, key=itemgetter(0))
    wrong = {name for difference, _, name in gradient_errors if not difference <= gradient_limit}
    if wrong:
        reason = f"the gradient of {name} on rank {rank} differs by {grad_diff:.1e}, more than {gradient_limit:.0e}"
        if len(wrong) > 1:
            reason = f"worst of {len(wrong)} wrong: {reason}"
        reasons.append(reason)
    # The others of a pipeline send less.
    busiest = max(curves, key=lambda curve: curve.sent or 0)
    expected_bytes = busiest.expected
    # A share of bytes need not be a whole number.
    if expected_bytes is not None:
        expected_bytes = round(expected_bytes)
    seconds = max(curve.seconds for curve in curves)
    return comparison(
        case,
        optimizer,
        training,
        max_rel_loss_diff=loss_diff,
        max_grad_diff=grad_diff,
        passed=not reasons,
        seconds=seconds,
        reason="; ".join(reasons),
        losses=curves[0].losses,
        expected_losses=expected.losses,
        sent=busiest.sent,
        expected=expected_bytes,
    )


# Heading → field of a `Comparison`, and how it is formatted.
COLUMNS = {
    "model": ("model", ""),
    "layout": ("layout", ""),
    "ranks": ("ranks", "d"),
    "technique": ("technique", ""),
    "optimizer": ("optimizer", ""),
    "loss": ("max_rel_loss_diff", ".1e"),
    "gradient": ("max_grad_diff", ".1e"),
    "sent": ("sent", ",d"),
    "least": ("expected", ",d"),
    "s": ("seconds", ".1f"),
    "": ("result", ""),
}
NUMERIC = (2, 5, 6, 7, 8, 9)  # indices of the columns that are aligned to the right


def table(rows: Sequence[Comparison]) -> str:
    """Returns one line for each training; below them, why those that did not pass did not."""
    cells = [[*COLUMNS]]
    for row in rows:
        cells.append([_cell(getattr(row, name), form) for name, form in COLUMNS.values()])
    lines = in_columns(cells, NUMERIC)
    for row in rows:
        if not row.passed:
            lines.append(f"{row.result}: {row.model} {row.layout} {row.technique} {row.optimizer}: {row.reason}")
    return "\n".join(lines)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    if value == 0:
        return "0"
    return format(value, form)


def write_json(rows: Sequence[Comparison], folder: Path) -> Path:
    """Write all rows, as a list of mappings. A number that is not finite is null. Returns the path."""
    path = folder / JSON
    text = json.dumps([_plain(asdict(row)) for row in rows], indent=1, ensure_ascii=False)
    # Whole or not at all: a killed run leaves the file before.
    write_atomically(path, text.encode() + b"\n")
    return path


def _plain(value: Any) -> Any:
    """Replace what JSON lacks, NaN and infinities, by None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
