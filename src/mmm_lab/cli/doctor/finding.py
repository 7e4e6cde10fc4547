"""What a check is given, what it answers, and how that is printed."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STATES = ("ok", "warn", "fail")
WIDTH = 100  # columns
NAME_WIDTH = 15


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        name: of the check, or of what it looked at.
        status: one of `STATES`.
        seen: what the check saw.
        fix: what to do where the status is not ok, or a note where it is.
    """

    name: str
    status: str
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Place:
    """What is looked at. Tests put something made up in its place.

    Attributes:
        environ: the environment.
        root: where /proc, /sys and /dev are looked for.
        outdir: where runs write.
        timeout: seconds that a check may take.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    outdir: Path = Path("outputs")
    timeout: float = 30.0

    @property
    def import_timeout(self) -> float:
        """Seconds that a check may take that imports torch, which reads thousands of files."""
        return 4 * self.timeout


def lines(finding: Finding) -> str:
    """Format a finding for people: a line or more of at most 100 columns, the fix below."""
    status = finding.status
    # A failure must be seen at once.
    if status == "fail":
        status = "FAIL"
    head = f"{status:<6}{finding.name:<{NAME_WIDTH}} "
    text = _wrapped(head, finding.seen, len(head))
    if finding.fix:
        arrow = "" if finding.status == "ok" else "→ "
        text += "\n" + _wrapped(" " * len(head) + arrow, finding.fix, len(head) + len(arrow))
    return text


def _wrapped(head: str, text: str, indent: int) -> str:
    wrapped = textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * indent)
    return wrapped or head


def summary(findings: Sequence[Finding]) -> str:
    """Say how many there are of each status."""
    statuses = [finding.status for finding in findings]
    return ", ".join(f"{statuses.count(status)} {status}" for status in STATES)
