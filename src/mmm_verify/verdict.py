"""The verdict of a verification: what was compared, what differs, and a certificate of it as JSON."""

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

SAME = "same"
NOT_SAME = "not the same"
NOT_COMPARABLE = "not comparable"
ROUNDED = "rounded to float32"
NOT_PARALLEL = "not parallel"
EXIT_CODES = {SAME: 0, NOT_SAME: 1, NOT_COMPARABLE: 2, ROUNDED: 2, NOT_PARALLEL: 2}
# Findings that are printed.
MAX_PRINTED = 6


@dataclass(frozen=True)
class Finding:
    """One thing that is not as on one device.

    Attributes:
        stage: the stage it was seen in: weights, batch, loss, gradients, step, step 2, dropout, or program.
        name: the parameter, buffer or module.
        rank: the first rank that has it; None if it belongs to no rank.
        relation: what it is instead of what it should be, in words.
        error: how far it is off, relative; infinite if that is not a number.
        count: number of tensors in the stage with the same relation.
    """

    stage: str
    name: str
    rank: int | None
    relation: str
    error: float = math.inf
    count: int = 1

    def __str__(self) -> str:
        text = self.name
        if self.rank is not None:
            text += f" on rank {self.rank}"
        text += f": {self.relation}"
        if self.error != math.inf:
            text += f", off by {self.error:.1e}"
        if self.count > 1:
            text += f" (and {self.count - 1} more likewise)"
        return text


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification.

    Attributes:
        result: ``same``, ``not the same``, ``not comparable``; ``rounded to float32`` if the parallel program
            computes in float32, the model does not, and that explains every difference; or ``not parallel`` if each
            rank of a script did all that one rank does.
        layout: the mesh, such as ``dp2·tp2``.
        ranks: number of ranks of the mesh.
        compared: stage → what was compared and how near it was, in words; in the order of the stages.
        findings: what is not the same, in the order in which it was found.
        first: the module or parameter where the two first differ; empty if they do not.
        reason: why nothing can be compared; empty if it can.
        notes: what else a reader has to know.
        advice: what is not an error, but may not be what the user meant.
        details: the program's traceback, if it failed.
        dtype: the type that everything was computed in: float64, float32 or bf16; empty if it is not known.
        tolerances: stage → how far a tensor may be off, relative, by name. Empty if the ranks were not compared.
        errors: stage → how far the worst of its tensors is off, relative, in stages that were compared by distance.
        against: what it was compared with.
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
    dtype: str = "float64"
    tolerances: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    against: str = "against one device"

    @property
    def same(self) -> bool:
        return self.result == SAME

    @property
    def exit_code(self) -> int:
        """0 if the two are the same, 1 if not, 2 for every other result."""
        return EXIT_CODES[self.result]

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        title = f"{self.result}: {self.layout} ({ranks}) {self.against}"
        if self.dtype:
            title += f", in {self.dtype}"
        if self.reason:
            title += f": {self.reason}"
        lines = [title]
        for stage, text in self.compared.items():
            lines.append(f"  {stage:<10} {text}")
        if self.first:
            lines.append(f"first difference: {self.first}")
        for finding in self.findings[:MAX_PRINTED]:
            lines.append(f"  {finding}")
        n_hidden = len(self.findings) - MAX_PRINTED
        if n_hidden > 0:
            lines.append(f"  … and {n_hidden} more findings")
        for note in self.notes:
            lines.append(f"note: {note}")
        for text in self.advice:
            lines.append(f"advice: {text}")
        return "\n".join(lines)


def certificate(verdicts: Sequence[Verdict], program: Subject | Sequence[str]) -> dict[str, Any]:
    """Verdicts as data for JSON, with what was verified: versions, the command, and hashes of the program's files.

    Args:
        verdicts: one for each mesh.
        program: the program on the last mesh, as on the others it differs only in the mesh; or a script with its
            arguments.
    """
    if isinstance(program, Subject):
        functions = {
            "model": _source(program.model_fn),
            "parallelize": _source(program.parallelize_fn),
            "batch": _source(program.batch_fn),
            "step": _source(program.step_fn),
        }
    else:
        functions = {"program": {"name": " ".join(program), "sha256": _hash_of(program[0])}}
    verdict_fields = [asdict(verdict) for verdict in verdicts]
    for fields in verdict_fields:
        for finding in fields["findings"]:
            # JSON has neither infinity nor NaN.
            if not math.isfinite(finding["error"]):
                finding["error"] = None
    return {
        "verdicts": verdict_fields,
        "functions": functions,
        "versions": {"mmm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "command": sys.argv,
    }


def _source(function: Any) -> dict[str, str | None]:
    """A function's name, and the hash of the file that it is in; None if it has no file."""
    module = getattr(function, "__module__", "?")
    # An instance or a functools.partial has no name of its own.
    name = getattr(function, "__qualname__", repr(function))
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        path = None
    return {"name": f"{module}.{name}", "sha256": _hash_of(path or "")}


def _hash_of(path: str) -> str | None:
    """The hash of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def write_json(verdicts: Sequence[Verdict], program: Subject | Sequence[str], path: Path) -> None:
    """Write a `certificate`. Raises RecordError."""
    text = json.dumps(certificate(verdicts, program), indent=2, ensure_ascii=False)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}") from None
