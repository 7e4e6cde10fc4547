"""What a check is given, what it answers, and how that is printed."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

STATES = ("ok", "warn", "fail")
WIDTH = 100


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
        environ: the environment. root: where /proc, /sys and /dev are looked for. prefix: of the virtual environment.
        outdir: where runs write. import_timeout: seconds that importing torch may take. timeout: any other check.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    prefix: Path = Path(sys.prefix)
    outdir: Path = Path("outputs")
    import_timeout: float = 120.0
    timeout: float = 30.0


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps([asdict(each) for each in findings], indent=2, ensure_ascii=False)


def table(findings: Sequence[Finding]) -> str:
    """A line a finding, its fix below it, and how many there are of each status; at most 100 columns."""
    name_width = max(len(each.name) for each in findings) + 2
    lines = []
    for each in findings:
        head = f"{each.status.upper() if each.status == 'fail' else each.status:<6}{each.name:<{name_width}}"
        lines += _wrapped(head, each.seen)
        if each.fix:
            lines += _wrapped(" " * len(head) + ("→ " if each.status != "ok" else ""), each.fix)
    counts = {status: sum(each.status == status for each in findings) for status in STATES}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])


def _wrapped(head: str, text: str) -> list[str]:
    rows = [row for line in text.splitlines() or [""] for row in textwrap.wrap(line, WIDTH - len(head)) or [""]]
    return [(head if i == 0 else " " * len(head)) + row for i, row in enumerate(rows)]
