"""The outcome of a verification: what was compared, what was found, and the certificate that says so."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmm_verify import __version__
from mmm_verify.errors import RecordError
from mmm_verify.subject import Subject

SAME, NOT_SAME, NOT_COMPARABLE, ROUNDED = "same", "not the same", "not comparable", "rounded to float32"
EXIT_CODES = {SAME: 0, NOT_SAME: 1, NOT_COMPARABLE: 2, ROUNDED: 2}
NAMED = 6  # findings that are printed
COLORS = {SAME: "#2e7d32", NOT_SAME: "#c62828", NOT_COMPARABLE: "#6d6d6d", ROUNDED: "#6d6d6d"}


@dataclass(frozen=True)
class Finding:
    """One thing that is not as on one device.

    Attributes:
        stage: in which it was seen: weights, batch, loss, gradients, step, dropout, or program.
        name: of the parameter, buffer or module. rank: the first that has it. relation: how it is to what it should be.
        error: relative; infinite where there is no number. count: how many tensors of the stage have the same relation.
    """

    stage: str
    name: str
    rank: int | None
    relation: str
    error: float = float("inf")
    count: int = 1

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank is not None else ""
        more = f" (and {self.count - 1} more likewise)" if self.count > 1 else ""
        off = f", off by {self.error:.1e}" if self.error != float("inf") else ""
        return f"{self.name}{where}: {self.relation}{off}{more}"


@dataclass(frozen=True)
class Verdict:
    """What a verification came to.

    Attributes:
        result: ``same``, ``not the same``, ``not comparable``; or ``rounded to float32`` where the parallel program
            computes in it, the model does not, and that is all that can be seen.
        layout: the mesh, such as ``dp2·tp2``. ranks: of it.
        compared: by stage, in order, what was compared and how near it was, in words.
        findings: what is not the same; the first is where the two part. reason: why nothing can be compared.
        first: the module or parameter where the two part; empty where they do not.
        notes: what else a reader has to know. advice: what is no fault, and may be meant otherwise.
        details: a traceback of the program, if it failed.
    """

    result: str
    layout: str
    ranks: int
    compared: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    first: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    details: str = ""

    @property
    def same(self) -> bool:
        return self.result == SAME

    @property
    def exit_code(self) -> int:
        """0 the same, 1 not the same, 2 not comparable or rounded."""
        return EXIT_CODES[self.result]

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        lines = [f"{self.result}: {self.layout} ({self.ranks} ranks) against one device, in float64"]
        if self.reason:
            lines[0] += f": {self.reason}"
        lines += [f"  {stage:<10} {text}" for stage, text in self.compared.items()]
        if self.first:
            lines.append(f"they part at {self.first}")
        lines += [f"  {finding}" for finding in self.findings[:NAMED]]
        if len(self.findings) > NAMED:
            lines.append(f"  … and {len(self.findings) - NAMED} more findings")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"advice: {text}" for text in self.advice]
        return "\n".join(lines)


def certificate(verdicts: Sequence[Verdict], subject: Subject) -> dict[str, Any]:
    """Verdicts as JSON has them, with what was verified: versions, hashes of the functions' files, the command.

    Args:
        subject: of the last of them; they differ in the mesh alone.
    """
    functions = {
        "model": subject.model_fn,
        "parallelize": subject.parallelize_fn,
        "batch": subject.batch_fn,
        "step": subject.step_fn,
    }
    fields = [asdict(verdict) for verdict in verdicts]
    for finding in (finding for verdict in fields for finding in verdict["findings"]):
        finding["error"] = (
            finding["error"] if math.isfinite(finding["error"]) else None
        )  # JSON has no infinity, nor NaN
    return {
        "verdicts": fields,
        "functions": {name: _source(function) for name, function in functions.items()},
        "versions": {"mmm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "command": sys.argv,
    }


def _source(function: Any) -> dict[str, str | None]:
    """Where a function's source lies, and the hash of that file."""
    named = {"name": f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"}
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
        content = Path(path or "").read_bytes()
    except (TypeError, OSError):
        return {**named, "sha256": None}
    return {**named, "sha256": hashlib.sha256(content).hexdigest()}


def write_json(verdicts: Sequence[Verdict], subject: Subject, path: Path) -> None:
    """Write a `certificate`. Raises RecordError."""
    _write(path, json.dumps(certificate(verdicts, subject), indent=2, ensure_ascii=False) + "\n")


def write_badge(verdict: Verdict, layouts: Sequence[str], path: Path) -> None:
    """A picture of one line, for a README: the worst verdict, of these layouts. Raises RecordError."""
    left, right = "mmm verify", f"{verdict.result} on {', '.join(layouts)}"
    widths = [7 * len(text) + 12 for text in (left, right)]
    total = sum(widths)
    _write(
        path,
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" aria-label="{left}: {right}">'
        f'<rect width="{widths[0]}" height="20" fill="#444"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{COLORS[verdict.result]}"/>'
        f'<g fill="#fff" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{widths[0] / 2}" y="14">{left}</text><text x="{widths[0] + widths[1] / 2}" y="14">{right}</text>'
        "</g></svg>\n",
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}") from None
