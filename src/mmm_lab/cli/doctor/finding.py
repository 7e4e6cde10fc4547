"""What a check is given, what it answers, and how that is printed."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

STATES = ("ok", "warn", "fail")
WIDTH = 100  # columns
NAME_WIDTH = 15


@dataclass(frozen=True)
class Finding:
    """One line of the table. `fix`: what to do where the status is not ok, or a note where it is."""

    name: str
    status: str
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Place:
    """What is looked at. Tests put something made up in its place.

    Attributes:
        environ: the environment. root: where /proc, /sys and /dev are looked for.
        outdir: where runs write. import_timeout: seconds that importing torch may take. timeout: any other check.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    outdir: Path = Path("outputs")
    import_timeout: float = 120.0
    timeout: float = 30.0


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(each) for each in findings], indent=2, ensure_ascii=False)


def lines(finding: Finding) -> str:
    """A finding for people: a line or more of at most 100 columns, the fix below."""
    status = finding.status.upper() if finding.status == "fail" else finding.status
    head = f"{status:<6}{finding.name:<{NAME_WIDTH}} "
    rows = _wrapped(head, finding.seen)
    if finding.fix:
        rows += _wrapped(" " * len(head) + ("→ " if finding.status != "ok" else ""), finding.fix)
    return "\n".join(rows)


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each status."""
    counts = {status: sum(each.status == status for each in findings) for status in STATES}
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _wrapped(head: str, text: str) -> list[str]:
    rows = textwrap.wrap(text, WIDTH - len(head)) or [""]
    return [(head if i == 0 else " " * len(head)) + row for i, row in enumerate(rows)]
