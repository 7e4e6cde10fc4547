"""Start-up times from any program's plain log: from the line that says when the job began, and the first step's.

Logs of Megatron-DeepSpeed's job scripts at ALCF say in their path how many ranks of which model they are of::

    outputs/gpt_actCkpt_GPT1T_4L_z1_seqlen2048_…/logs/user-x3004c0s13b0n0-nhosts4-ngpu16-2023-11-02-183323.log
                        └model─┘                                                └ranks─┘

A report of such logs, a table in Markdown, is read as well: from its times of start and stop, whatever it says of their
difference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from mmm.errors import DataError

JOB = re.compile(r"Job started at:?\s*(\d{4})-(\d\d)-(\d\d)[-T ](\d\d):?(\d\d):?(\d\d)(?:\s+on\s+(\S+))?")
DATED = re.compile(r"(\d{4})-(\d\d)-(\d\d)[-T ](\d\d):?(\d\d):?(\d\d)(?!:?\d)")
CLOCK = re.compile(r"(?<![\d:.])(\d\d):(\d\d):(\d\d)(?!:?\d)")
STEP = re.compile(r"\b(?:iter|iteration|step)\b[\s:=\[(#]*\d", re.IGNORECASE)
MODEL = re.compile(r"\bmodel(?:[_ ]?(?:name|type|size))?\s*[=:]\s*['\"]?([\w.+/-]*\w)", re.IGNORECASE)
RANKS = (
    re.compile(r"\bworld[_ ]size['\"]?\s*[=:]\s*(\d+)", re.IGNORECASE),
    re.compile(r"\bn(?:um)?_?(?:gpus|ranks)\s*[=:]\s*(\d+)", re.IGNORECASE),
    re.compile(r"\b(\d+) (?:ranks|GPUs)\b", re.IGNORECASE),
    re.compile(r"\branks\s*[=:]\s*(\d+)", re.IGNORECASE),
)

PATH_MODEL = re.compile(r"(?:^|_)([A-Z][A-Za-z]*\d\w*?)_z\d+(?:_|$)")
PATH_RANKS = re.compile(r"-nhosts\d+-ngpus?(\d+)-")
STAMP = r"\d{4}-\d\d-\d\d[-T ]\d\d:?\d\d:?\d\d"
ROW = re.compile(rf"\|\s*`?([^|`]+?\.log)`?\s*\|\s*([^|]+?)\s*\|\s*(\d+)\s*\|\s*({STAMP})\s*\|\s*({STAMP})\s*\|")


@dataclass(frozen=True)
class LoggedStart:
    """One start of a program: when its job began, when its first step was logged, and the name of the log."""

    model: str
    ranks: int
    start: datetime
    stop: datetime
    log: str

    @property
    def seconds(self) -> float:
        return (self.stop - self.start).total_seconds()


class Log(NamedTuple):
    """starts: of the jobs in a log. without: how many more jobs began, and ended before their first step."""

    starts: list[LoggedStart]
    without: int


def read_log(path: Path, model: str | None = None, ranks: int | None = None) -> Log:
    """Every start in a log.

    Both times are taken in whole seconds, as the first is written. A step's time without a date is the next one after
    the start: of the day after where the clock shows less.

    What the path says of model and ranks counts before what the log does.

    Args:
        model, ranks: instead of what path and log say.

    Raises:
        DataError: it cannot be read, or holds no start; it names what was looked for.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    jobs = [number for number, line in enumerate(lines) if JOB.search(line)]
    if not jobs and (report := [row for line in lines if (row := ROW.search(line))]):
        return Log([_of_row(path, row, model, ranks) for row in report], 0)
    if not jobs:
        raise DataError(
            f"{path}: none of its {len(lines)} lines is `Job started at: YYYY-MM-DD-HHMMSS on HOST`, which "
            f"a job script would write (for a run of mmm's own, give its folder)"
        )
    found = []
    for place, number in enumerate(jobs):
        end = jobs[place + 1] if place + 1 < len(jobs) else len(lines)
        stop = _first_step(path, lines[number:end])
        if stop is not None:
            text = "\n".join([*lines[number:end], *lines[: jobs[0]]])  # its own lines first, then those above all
            name, count = model or _model(path, text), ranks or _ranks(path, text)
            found.append(LoggedStart(name, count, _job(path, lines[number]), stop, path.name))
    if not found:
        raise DataError(
            f"{path}: a job began ({_job(path, lines[jobs[0]])}), but no line after it holds both a time "
            f"(HH:MM:SS) and a step (`iter=0`, `step: 1`, …): it may have ended before"
        )
    return Log(found, len(jobs) - len(found))


def _job(path: Path, line: str) -> datetime:
    match = JOB.search(line)
    assert match is not None
    return _time(path, match[0])


def _time(path: Path, text: str) -> datetime:
    """The date and time in a text that has both. Raises DataError where digits are no time."""
    match = DATED.search(text)
    assert match is not None
    try:
        year, month, day, hour, minute, second = map(int, match.groups())
        return datetime(year, month, day, hour, minute, second)
    except ValueError as error:
        raise DataError(f"{path}: `{text}` is no time: {error}") from None


def _of_row(path: Path, row: re.Match[str], model: str | None, ranks: int | None) -> LoggedStart:
    """The start that a row of a report is of."""
    start, stop = _time(path, row[4]), _time(path, row[5])
    if stop < start:
        raise DataError(f"{path}: the first step ({stop}) lies before the start of its job ({start}): {row[1]}")
    return LoggedStart(model or row[2], ranks or int(row[3]), start, stop, row[1])


def _first_step(path: Path, lines: list[str]) -> datetime | None:
    """When the first step was logged, of the job whose line comes first."""
    start = _job(path, lines[0])
    for line in lines[1:]:
        stop = _stamp(line, start) if STEP.search(line) else None
        if stop is not None and stop < start:
            raise DataError(f"{path}: the first step ({stop}) lies before the start of its job ({start}): {line}")
        if stop is not None:
            return stop
    return None


def _stamp(line: str, start: datetime) -> datetime | None:
    """The first time in a line that has a date; else the first without one, which is the next such time."""
    for pattern in (DATED, CLOCK):
        for match in pattern.finditer(line):
            *date, hour, minute, second = map(int, match.groups())
            try:
                if date:
                    return datetime(date[0], date[1], date[2], hour, minute, second)
                stop = start.replace(hour=hour, minute=minute, second=second)
            except ValueError:
                continue  # digits that are no time
            return stop if stop >= start else stop + timedelta(days=1)
    return None


def _model(path: Path, text: str) -> str:
    in_path = (match for part in reversed(path.absolute().parts) if (match := PATH_MODEL.search(part)))
    named = next(in_path, None) or MODEL.search(text)
    return named[1] if named else "-"


def _ranks(path: Path, text: str) -> int:
    if named := PATH_RANKS.search(path.name):
        return int(named[1])
    for pattern in RANKS:
        if match := pattern.search(text):
            return int(match[1])
    raise DataError(
        f"{path}: it does not say how many ranks there were (looked for `world_size=N`, `NGPUS=N`, "
        f"`N ranks`): give --ranks N"
    )
