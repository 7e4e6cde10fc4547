"""Compares a script that was stopped and started anew with itself without a stop: what has its checkpoint left out?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmm_verify.difference import fits, relative_to_itself, worst
from mmm_verify.dtypes import dtype_name
from mmm_verify.noise import MARGIN, MARGIN_16_BITS
from mmm_verify.program.compare import why_not_watched
from mmm_verify.program.state import KINDS, Copy, Key, States
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, SAME, Finding, Verdict

# However exactly a script repeats itself, a schedule may be computed in another order.
FLOOR = 1e-9
# How far an average of the weights, whose rounding is not measured, may be off.
COPY_TOLERANCE = 1e-5
# Kind → what it means that the new start has what the first one had.
AS_AT_THE_START = {
    "moments": "the optimizer's moments are lost",
    "rates": "the schedule starts from its beginning",
    "scaler": "the GradScaler starts from its beginning",
    "batch": "the sampler starts from its beginning",
}
EFFECTS = ("loss", "gradients")
RANDOM = "random numbers"
ITSELF = "against itself without a stop"


def distance(value: Tensor | None, expected: Tensor | None) -> float:
    """How far a value is off, relative to the largest element; 0 for the same bits, infinite for another shape."""
    if value is None or expected is None:
        return math.inf
    return relative_to_itself(value, expected)


class Comparison:
    """What is compared with a script without a stop.

    Args:
        unbroken: by rank, the run without a stop.
        nudged: the same from weights that were moved by one rounding, which measures rounding; empty to compare bits.

    Attributes:
        worst: by kind, the largest distance of values that count as the same.
    """

    def __init__(self, unbroken: Sequence[States], nudged: Sequence[States]) -> None:
        self.unbroken = unbroken
        self.nudged = nudged
        self.worst: dict[str, float] = defaultdict(float)

    def step(self, ranks: Sequence[States], done: int, start: int) -> list[Finding]:
        """What differs in a step of ranks that began after `start` steps: causes if there are any, else effects."""
        now = start + done
        findings: dict[Key, Finding] = {}
        for rank, own in enumerate(ranks):
            unbroken = self.unbroken[rank]
            for key, expected in unbroken.states[now].items():
                kind, name = key
                value = own.states[done].get(key)
                error = distance(value, expected)
                if error <= self._tolerance(rank, key, now, value):
                    self.worst[kind] = max(error, self.worst[kind])
                    continue
                relation = self._relation(rank, key, value, now)
                first = Finding(kind, name, rank, relation, error, count=0)
                known = findings.get((kind, relation), first)
                count = known.count + 1
                findings[kind, relation] = replace(known, count=count)
        # Causes come first. Without one, what they would explain is reported.
        in_order = sorted(findings.values(), key=lambda finding: KINDS.index(finding.stage))
        causes = [finding for finding in in_order if finding.stage not in (RANDOM, *EFFECTS)]
        return causes or in_order

    def _tolerance(self, rank: int, key: Key, now: int, value: Tensor | None) -> float:
        """How far a value may be off."""
        kind, _ = key
        of_rank_0 = self.unbroken[0].states[now].get(key)
        # DDP sends rank 0's buffers before each forward, so that a checkpoint needs only these.
        if kind == "buffers" and distance(value, of_rank_0) == 0:
            return math.inf
        if not self.nudged or kind in (RANDOM, "batch"):
            return 0.0
        if kind == "rates":
            return FLOOR
        unbroken = self.unbroken[rank]
        moved = self.nudged[rank].states[now].get(key)
        noise = distance(moved, unbroken.states[now][key])
        dtype = unbroken.dtype
        margin = MARGIN_16_BITS if dtype.itemsize == 2 else MARGIN
        # A single number may be where it was by chance.
        return margin * max(torch.finfo(dtype).eps, noise)

    def _relation(self, rank: int, key: Key, value: Tensor | None, now: int) -> str:
        """Which step's value it is instead of the right one's."""
        kind, _ = key
        meanings = {
            0: AS_AT_THE_START.get(kind, "it was not loaded"),
            now - 1: "the count of steps is one too low",
            now + 1: "the count of steps is one too high",
        }
        states = self.unbroken[rank].states
        # The likely ones first: a value may be that of several steps.
        steps = range(len(states))
        for other in (*meanings, *steps):
            if other == now or other not in steps:
                continue
            theirs = states[other].get(key)
            # Before the first step, an optimizer keeps nothing.
            keeps_nothing = value is None and theirs is None
            if keeps_nothing or distance(value, theirs) == 0:
                meaning = meanings.get(other, "another one")
                return f"is that of step {other + 1}, not of step {now + 1}: {meaning}"
        if value is None:
            return "is missing"
        if kind == "weights" and fits(value, torch.bfloat16):
            return f"is that of step {now + 1}, rounded to bfloat16"
        if kind == "rates":
            return "is that of no step: the schedule was not loaded, or counts other steps"
        return "is that of no step"

    def lost_average(self, ranks: Sequence[States]) -> list[Finding]:
        """An average of the weights that the last step of a run does not have as the unbroken run has it."""
        for rank, own in enumerate(ranks):
            *_, before, last = self.unbroken[rank].copies
            for copy in last:
                # It moves with each step. What stays may be a checkpoint that is still in memory.
                if any(_farthest(other, copy) == 0 for other in before):
                    continue
                distances = [_farthest(other, copy) for other in own.copies[-1]]
                if not any(far <= COPY_TOLERANCE for far in distances):
                    relation = "is not that of a run without a stop: the average (EMA) was not loaded"
                    return [Finding("averages", "a copy of the weights", rank, relation)]
        return []


def _farthest(copy: Copy, expected: Copy) -> float:
    """How far the worst tensor of a copy is off."""
    distances = [distance(copy[name], value) for name, value in expected.items()]
    return worst(distances)


def compare_resumed(
    name: str,
    first: Sequence[States],
    resumed: Sequence[States],
    unbroken: Sequence[States],
    nudged: Sequence[States] = (),
) -> Verdict:
    """Compare a script that was stopped and started anew with itself without a stop.

    Args:
        name: the script.
        first: by rank, the steps before the stop.
        resumed: those after the new start.
        unbroken, nudged: see `Comparison`.
    """
    comparison = Comparison(unbroken, nudged)
    stop = len(first[0].states)
    # Rank 0 stands for all where they have to agree.
    rank_0 = unbroken[0]
    dtype = dtype_name(rank_0.dtype)
    verdict = Verdict(NOT_COMPARABLE, name, len(unbroken), dtype=dtype, against=ITSELF)
    reason = why_not_watched(rank_0)
    if reason:
        return replace(verdict, reason=reason)
    unseeded: set[str] = set()
    for done in range(stop):
        findings = comparison.step(first, done, 0)
        if any(finding.stage != RANDOM for finding in findings):
            reason = f"not deterministic: two starts from the beginning differ in step {done + 1}. Seed all that draws"
            return replace(verdict, reason=reason, findings=tuple(findings))
        unseeded.update(finding.name for finding in findings)
    start = _start(rank_0, resumed[0], stop)
    if start == 0:
        reason = (
            "the new start begins with the weights of the first one: no checkpoint was found, or none was written in "
            f"{stop} steps (--stop-after is how many), or it is not loaded"
        )
        return replace(verdict, reason=reason)
    more = min(stop, len(rank_0.states) - start)
    verdict = replace(
        verdict,
        layout=f"{name}, {start} steps and {more} after a new start",
        against=f"against {start + more} without a stop",
    )
    notes = []
    if start != stop:
        notes.append(f"stopped after step {stop}, and the weights of the new start are those after step {start}")
    for done in range(more):
        findings = comparison.step(resumed, done, start)
        findings = [finding for finding in findings if finding.name not in unseeded]
        if not findings:
            continue
        cause = findings[0]
        if findings[-1].stage != RANDOM:
            ordinal = done + 1
            return replace(
                verdict,
                result=NOT_SAME,
                first=f"{cause.stage} of step {start + ordinal}, number {ordinal} after the new start",
                findings=tuple(findings),
                notes=tuple(notes),
            )
        if not done:
            notes.append(f"{cause.name} was not restored, and nothing in these steps shows it")
    findings = []
    # The last steps of both runs are the same one.
    if start == stop:
        findings = comparison.lost_average(resumed)
    if findings:
        return replace(
            verdict,
            result=NOT_SAME,
            first="averages of the last step",
            findings=tuple(findings),
        )
    compared = {"runs": f"deterministic: two starts took the same {stop} steps"}
    counts = Counter(kind for kind, _ in rank_0.states[start])
    for kind in KINDS:
        count = counts[kind]
        if not count or kind == RANDOM:
            continue
        error = comparison.worst[kind]
        nearness = f"within {error:.0e}" if error else "bit for bit"
        compared[kind] = f"same: {count} in each step, {nearness}"
    return replace(verdict, result=SAME, compared=compared, notes=tuple(notes))


def _start(unbroken: States, resumed: States, stop: int) -> int:
    """How many steps made the weights of a new start: those with the nearest weights, if equal those near the stop."""

    def score(done: int) -> tuple[float, int]:
        total = 0.0
        for key, expected in unbroken.states[done].items():
            kind, _ = key
            if kind == "weights":
                own = resumed.states[0].get(key)
                total += min(1.0, distance(own, expected))
        return total, abs(done - stop)

    return min(range(len(unbroken.states)), key=score)
