"""Where the time goes between the shell and the end of the first step, on each rank; and what a process has cost.
Imports no torch.

Six marks, each the seconds since 1970 at which

    started      A: `launch` was started; or what MMM_STARTED_AT says; or, with neither, this process was
    began        B: the program begins in the rank, after the shared imports where ranks are forked
    ready        all that needs no other rank is done: imports, options, data, checks
    group        the process group is up, and every rank has answered
    model        the model is built: the first step begins
    first_step   C: the first step has ended, the device waited for

What lies between two is given a name in `table`. `launch` times the imports that ranks share by package, once, in the
process that ranks are forked from. What a rank imports itself is one number, up to the program's main function.
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

from mmm.runtime import contract

_LOADED = time.time()  # for systems that do not say when a process was started
MARKS = ("started", "began", "ready", "group", "model", "first_step")
NAN = math.nan
LONGEST = 4  # packages that are named: those that took longest
SINCE = {"launch": "`launch`", "process": "the start of the process", "MMM_STARTED_AT": "MMM_STARTED_AT"}


@dataclass
class Times:
    """One rank's marks (see this file's head), in seconds since 1970; NaN for what has not happened.

    Attributes:
        imports: package: seconds, of this rank between `began` and `ready`.
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
        """In the order of `MARKS`."""
        return [float(getattr(self, mark)) for mark in MARKS]


_own_imports: dict[str, float] = {}


def imported() -> None:
    """The program's main function begins: its imports are done."""
    _own_imports["all packages"] = time.time() - _began()


def ready() -> Times:
    """All that needs no other rank is done."""
    started, source = contract.started(os.environ, _LOADED)
    return Times(started, _began(), time.time(), imports=dict(_own_imports), source=source)


def _began() -> float:
    """When the program began: where nothing has noted it, with its process."""
    return contract.program_start().began or contract.process_start() or _LOADED


def as_record(source: str, marks: Sequence[Sequence[float]], imports: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What config.json holds under ``startup``.

    Args:
        marks: by rank, in the order of `MARKS`. imports: by rank, package: seconds.
    """
    columns = zip(MARKS, zip(*marks, strict=True), strict=True)
    return {
        "started_from": source,
        "marks": {name: [None if math.isnan(value) else value for value in values] for name, values in columns},
        "imports": {
            "shared": _rounded(contract.program_start().shared),
            "ranks": [_rounded(seconds) for seconds in imports],
        },
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in sorted(seconds.items(), key=lambda item: -item[1])}


def parts(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Part of the start-up: its seconds by rank. They add up to the time from the first mark to the last there is."""
    times = {name: [NAN if value is None else value for value in values] for name, values in record["marks"].items()}
    shared = sum(record["imports"]["shared"].values())
    own = [sum(seconds.values()) for seconds in record["imports"]["ranks"]]

    def between(first: str, last: str) -> list[float]:
        return [b - a for a, b in zip(times[first], times[last], strict=True)]

    by_part = {
        "launch": [seconds - shared for seconds in between("started", "began")],
        "imports": [shared + imports for imports in own],
        "options, data, checks": [
            seconds - imports for seconds, imports in zip(between("began", "ready"), own, strict=True)
        ],
        "process group": between("ready", "group"),
        "model": between("group", "model"),
        "first step": between("model", "first_step"),
    }
    return {name: values for name, values in by_part.items() if not any(map(math.isnan, values))}


def span(record: Mapping[str, Any]) -> tuple[datetime, datetime] | None:
    """When the start-up began, and when the first step had ended on the last rank. None without a first step."""
    ends = record["marks"]["first_step"]
    if any(end is None for end in ends):
        return None
    return datetime.fromtimestamp(min(record["marks"]["started"])), datetime.fromtimestamp(max(ends))


def table(record: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """The parts, each its median over the ranks; the slowest rank; the packages that took longest to import."""
    by_part = parts(record)
    totals = [sum(values) for values in zip(*by_part.values(), strict=True)]
    slow = totals.index(max(totals))
    last = "the end of the first step" if "first step" in by_part else "the process group"
    ranks = len(totals)
    among = f", median of {ranks} ranks; rank {slow} on {hosts[slow]}: {max(totals):.2f} s" if ranks > 1 else ""
    source = record["started_from"]
    lines = [
        f"start-up: {median(totals):.2f} s from {SINCE.get(source, source)} to {last}{among}",
        "  " + ", ".join(f"{name}: {median(values):.2f}" for name, values in by_part.items()),
    ]
    shared = record["imports"]["shared"]
    if shared:
        longest = sorted(shared.items(), key=lambda item: -item[1])[:LONGEST]
        lines.append("  imported once for all: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest))
    return "\n".join(lines)
