"""Measures where the time goes between the shell and the end of the first step, on each rank. Imports no torch.

There are six marks, each in seconds since 1970:

    started      A: `launch` was started; or the time in MMM_STARTED_AT; or, with neither, this process was started
    began        B: the program begins in the rank, after the shared imports if ranks are forked
    ready        everything that needs no other rank is done: imports, options, data, checks
    group        the process group is up, and every rank has answered
    model        the model is built: the first step begins
    first_step   C: the first step has ended, and the device has finished it

`table` names what lies between two marks. `launch` times the imports that ranks share, package by package, once, in
the process that ranks are forked from. A rank's own imports are one number, up to the program's main function.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from mmm.errors import LaunchError
from mmm_launch import contract

# When this module was loaded, for systems that do not tell when a process was started.
_LOADED = time.time()
MARKS = ("started", "began", "ready", "group", "model", "first_step")
NAN = math.nan

# Seconds by which a time may lie in the future. A later one is from another clock, or from before this one was set
# back.
AHEAD = 1.0

# How many packages are named: those whose import took longest.
LONGEST = 4

# Source of the first mark → what to call it.
SINCE = {
    "launch": "`launch`",
    "process": "the start of the process",
    "MMM_STARTED_AT": "MMM_STARTED_AT",
}


@dataclass
class Times:
    """One rank's marks, in seconds since 1970; NaN for what has not happened. The head of this file describes them.

    Attributes:
        started: when `launch`, the job or this process was started.
        began: when the program began in this rank.
        ready: when everything that needs no other rank was done.
        group: when the process group was up.
        model: when the model was built.
        first_step: when the first step had ended.
        imports: package → seconds of its import by this rank, between `began` and `ready`.
        source: who says when it started: ``launch``, ``MMM_STARTED_AT`` or ``process``.
    """

    started: float
    began: float
    ready: float
    group: float = NAN
    model: float = NAN
    first_step: float = NAN
    imports: Mapping[str, float] | None = None
    source: str = "process"

    def marks(self) -> list[float]:
        """Return the marks in the order of `MARKS`."""
        return [float(getattr(self, mark)) for mark in MARKS]


_own_imports: dict[str, float] = {}


def imported() -> None:
    """Note that the program's main function begins: its imports are done."""
    _own_imports["all packages"] = time.time() - _began()


def ready() -> Times:
    """Note that everything that needs no other rank is done."""
    first, source = started(os.environ, _LOADED)
    return Times(first, _began(), time.time(), imports=dict(_own_imports), source=source)


def _began() -> float:
    """When the program began; if nothing has noted it, when its process was started."""
    return contract.program_start().began or contract.process_start() or _LOADED


def started(environ: Mapping[str, str], otherwise: float) -> tuple[float, str]:
    """Return when the start-up of this process began, and who says so: ``MMM_STARTED_AT``, ``launch`` or ``process``.

    Args:
        environ: the environment variables to read.
        otherwise: the time to take if neither the environment nor the system tells one.

    Raises:
        LaunchError: a variable's value is not a time. One in the future is ignored.
    """
    for name, source in ((contract.STARTED_VARIABLE, contract.STARTED_VARIABLE), (contract.BEGAN_VARIABLE, "launch")):
        if environ.get(name):
            began = _time(name, environ[name])
            if began < time.time() + AHEAD:
                return began, source
    return contract.process_start() or otherwise, "process"


def _time(name: str, text: str) -> float:
    """Read the time that a variable has as its value, in seconds since 1970."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    # Written so that NaN is refused as well.
    if not seconds > 0:
        raise LaunchError(
            f"{name}={text} in the environment is not a time in the past, in seconds since 1970: set it "
            f"with `export {name}=$(date +%s.%N)`, or unset it"
        )
    return seconds


def as_record(
    source: str,
    marks: Sequence[Sequence[float]],
    imports: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Return what config.json holds under ``startup``.

    Args:
        source: who says when the start-up began: ``launch``, ``MMM_STARTED_AT`` or ``process``.
        marks: marks of every rank, in the order of `MARKS`.
        imports: package → seconds of its import, of every rank.
    """
    marks_by_name: dict[str, list[float | None]] = {}
    for name, seconds_by_rank in zip(MARKS, zip(*marks, strict=True), strict=True):
        # JSON has no NaN.
        marks_by_name[name] = [None if math.isnan(seconds) else seconds for seconds in seconds_by_rank]
    shared = contract.program_start().shared
    return {
        "started_from": source,
        "marks": marks_by_name,
        "imports": {
            "shared": _rounded(shared),
            "ranks": [_rounded(seconds) for seconds in imports],
        },
    }


def _rounded(imports: Mapping[str, float]) -> dict[str, float]:
    """Round seconds to microseconds, and sort them: the longest first."""
    longest_first = sorted(imports.items(), key=lambda item: -item[1])
    return {name: round(seconds, 6) for name, seconds in longest_first}


def parts(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Split the start-up into parts: name → its seconds on each rank.

    The parts add up to the time from the first mark to the last that was reached.

    Args:
        record: what `as_record` has returned.
    """
    times: dict[str, list[float]] = {}
    for name, marks in record["marks"].items():
        times[name] = [NAN if mark is None else mark for mark in marks]
    shared_imports = sum(record["imports"]["shared"].values())
    own_imports = [sum(imports.values()) for imports in record["imports"]["ranks"]]

    def between(first: str, last: str) -> list[float]:
        return [end - begin for begin, end in zip(times[first], times[last], strict=True)]

    # The shared imports lie before `began`, a rank's own between `began` and `ready`: both are taken out there.
    until_began = between("started", "began")
    until_ready = between("began", "ready")
    by_part = {
        "launch": [seconds - shared_imports for seconds in until_began],
        "imports": [shared_imports + imports for imports in own_imports],
        "options, data, checks": [seconds - imports for seconds, imports in zip(until_ready, own_imports, strict=True)],
        "process group": between("ready", "group"),
        "model": between("group", "model"),
        "first step": between("model", "first_step"),
    }
    # A part is left out if its end was not reached.
    reached = {}
    for name, seconds in by_part.items():
        if not any(map(math.isnan, seconds)):
            reached[name] = seconds
    return reached


def span(record: Mapping[str, Any]) -> tuple[datetime, datetime] | None:
    """Return when the start-up began, and when the last rank had ended its first step; None without a first step."""
    starts = record["marks"]["started"]
    ends = record["marks"]["first_step"]
    if any(end is None for end in ends):
        return None
    return datetime.fromtimestamp(min(starts)), datetime.fromtimestamp(max(ends))


def table(record: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """Describe a start-up: its parts, each as the median over the ranks, the slowest rank, and the longest imports.

    Args:
        record: what `as_record` has returned.
        hosts: host name of every rank.
    """
    by_part = parts(record)
    # Seconds of the whole start-up on each rank.
    totals = [sum(seconds) for seconds in zip(*by_part.values(), strict=True)]
    n_ranks = len(totals)
    last = "the end of the first step" if "first step" in by_part else "the process group"
    source = record["started_from"]
    since = SINCE.get(source, source)
    headline = f"start-up: {median(totals):.2f} s from {since} to {last}"
    if n_ranks > 1:
        slowest = totals.index(max(totals))
        headline += f", median of {n_ranks} ranks; slowest: rank {slowest} on {hosts[slowest]}, {totals[slowest]:.2f} s"
    medians = []
    for name, seconds in by_part.items():
        medians.append(f"{name}: {median(seconds):.2f}")
    lines = [headline, f"  {', '.join(medians)}"]
    shared = record["imports"]["shared"]
    if shared:
        longest_first = sorted(shared.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest_first[:LONGEST])
        lines.append(f"  imported once for all: {named}")
    return "\n".join(lines)
