"""The verdict on each layout, and what is left of it: a table, and JSON."""

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
GRADIENT_LIMIT = {"fp64": 1e-8, "fp32": 1e-3}  # of the largest element of the parameter's gradient
JSON, ERRORS = "parity.json", "errors.txt"


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
        return "FAIL" if self.losses else "error"


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
    return Comparison(**_about(case, optimizer, training), reason=reason)


def _about(case: ParityCase, optimizer: str, training: Training) -> dict[str, Any]:
    same = {name: getattr(case, name) for name in ("layout", "ranks", "model", "technique")}
    return {**same, "optimizer": optimizer, "steps": training.steps}


COLUMNS = {  # heading → field of a `Comparison`, and how it is shown
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
NUMBERS = [place for place, (_, form) in enumerate(COLUMNS.values()) if form]  # columns that end at the right


def table(rows: Sequence[Comparison]) -> str:
    """One line a training; below it, why those that did not pass did not."""
    cells = [[_shown(getattr(row, field), form) for field, form in COLUMNS.values()] for row in rows]
    lines = in_columns([[*COLUMNS], *cells], NUMBERS)
    for row in rows:
        if not row.passed:
            lines.append(f"{row.result}: {row.model} {row.layout} {row.technique} {row.optimizer}: {row.reason}")
    return "\n".join(lines)


def _shown(value: Any, form: str) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else format(value, form)


def write_json(rows: Sequence[Comparison], folder: Path) -> Path:
    """All rows, as a list of mappings; what is no finite number is null."""
    path = folder / JSON
    text = json.dumps([_plain(asdict(row)) for row in rows], indent=1, ensure_ascii=False)
    write_atomically(path, text.encode() + b"\n")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
