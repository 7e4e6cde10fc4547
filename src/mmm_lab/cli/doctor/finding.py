"""What a check says, and how that is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STATES = ("ok", "warn", "fail")


class Finding(NamedTuple):
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


def text_of(finding: Finding) -> str:
    """A finding for people: one line, and the fix below it."""
    status = finding.status
    # A failure must be seen at once.
    if status == "fail":
        status = "FAIL"
    text = f"{status:<6}{finding.name:<15} {finding.seen}"
    if finding.fix:
        text += f"\n{'':22}→ {finding.fix}"
    return text


def summary(findings: Sequence[Finding]) -> str:
    """Say how many there are of each status."""
    statuses = [finding.status for finding in findings]
    return ", ".join(f"{statuses.count(status)} {status}" for status in STATES)
