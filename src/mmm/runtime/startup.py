"""Measures where the time goes between the shell and the end of the first step, on each rank. Imports no torch.

Each mark is in seconds since 1970, and ends a part of the start-up:

    started      A: `launch` was started; or the time in MMM_STARTED_AT; or, with neither, this process was started
    began        B: the program begins in the rank, after the shared imports if ranks are forked
    imported     the program's main function begins: this rank's own imports are done
    ready        everything that needs no other rank is done: options, data, checks
    group        the process group is up, and every rank has answered
    model        the model is built: the first step begins
    first_step   C: the first step has ended, and the device has finished it

`launch` times the imports that ranks share, package by package, once, in the process that ranks are forked from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from mmm.errors import LaunchError
from mmm_launch import contract

# When this module was loaded, for systems that do not tell when a process was started.
_LOADED = time.time()
# Mark → the part of the start-up that it ends.
MARKS = {
    "started": "",
    "began": "launch",
    "imported": "imports",
    "ready": "options, data, checks",
    "group": "process group",
    "model": "model",
    "first_step": "first step",
}

# Seconds by which a time may lie in the future. A later one is from another clock, or from before this one was set
# back.
AHEAD = 1.0

# How many packages are named: those whose import took longest.
LONGEST = 4

# The marks of this process so far.
_marks: dict[str, float] = {}


def imported() -> None:
    """Note that the program's main function begins: its imports are done."""
    _marks["imported"] = time.time()


def ready() -> tuple[dict[str, float], str]:
    """Return the marks up to now, when everything that needs no other rank is done, and who says when the first was."""
    first, source = started(os.environ, _LOADED)
    # If nothing has noted when the program began, it is when its process was started.
    began = contract.program_start().began or contract.process_start() or _LOADED
    now = time.time()
    return {"started": first, "began": began, "imported": began, **_marks, "ready": now}, source


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


def as_record(source: str, marks: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return what config.json holds under ``startup``.

    Args:
        source: who says when the start-up began: ``launch``, ``MMM_STARTED_AT`` or ``process``.
        marks: marks of every rank. One that was not reached is missing.
    """
    by_name: dict[str, list[float | None]] = {}
    for name in MARKS:
        by_name[name] = [of_rank.get(name) for of_rank in marks]
    return {
        "started_from": source,
        "marks": by_name,
        "imports": {"shared": dict(contract.program_start().shared)},
    }


def parts(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Split the start-up into parts: name → its seconds on each rank.

    The parts add up to the time from the first mark to the last that was reached.

    Args:
        record: what `as_record` has returned, now or in an earlier version, which had fewer marks.
    """
    reached = {}
    for mark, part_name in MARKS.items():
        times = record["marks"].get(mark, [None])
        if None not in times:
            reached[part_name] = times
    by_part = {}
    for (_, begins), (part_name, ends) in pairwise(reached.items()):
        by_part[part_name] = [end - begin for begin, end in zip(begins, ends, strict=True)]
    # The shared imports lie before `began`.
    shared = sum(record["imports"]["shared"].values())
    if "imports" in by_part:
        by_part["launch"] = [seconds - shared for seconds in by_part["launch"]]
        by_part["imports"] = [seconds + shared for seconds in by_part["imports"]]
    return by_part


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
    headline = f"start-up: {median(totals):.2f} s from {record['started_from']} to {last}"
    if n_ranks > 1:
        slowest = totals.index(max(totals))
        headline += f", median of {n_ranks} ranks; slowest: rank {slowest} on {hosts[slowest]}, {totals[slowest]:.2f} s"
    medians = []
    for name, seconds in by_part.items():
        medians.append(f"{name}: {median(seconds):.2f}")
    lines = [headline, f"  {', '.join(medians)}"]
    # What would be shown as 0.00 took no time.
    shared = {name: seconds for name, seconds in record["imports"]["shared"].items() if seconds >= 0.005}
    if shared:
        longest_first = sorted(shared.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest_first[:LONGEST])
        lines.append(f"  imported once for all: {named}")
    return "\n".join(lines)
