"""Compares a script that was stopped and started anew with itself without a stop: what has its checkpoint left out?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmm_verify.difference import finite_size_of, fits, relative, same_elements
from mmm_verify.dtypes import dtype_name, widest
from mmm_verify.noise import MARGIN, MARGIN_16_BITS
from mmm_verify.program.compare import why_not_watched
from mmm_verify.program.state import KINDS, States
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
    if value is None or expected is None or value.shape != expected.shape:
        return math.inf
    if same_elements(value, expected):
        return 0.0
    return relative(value, expected, finite_size_of(widest(expected)))


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
        by_relation: dict[tuple[str, str], Finding] = {}
        for rank, own in enumerate(ranks):
            for key, expected in self.unbroken[rank].states[now].items():
                value = own.states[done].get(key)
                error = distance(value, expected)
                if error <= self._tolerance(rank, key, now, value, error):
                    self.worst[key[0]] = max(error, self.worst[key[0]])
                    continue
                relation = self._relation(rank, key, value, now)
                known = by_relation.get((key[0], relation), Finding(key[0], key[1], rank, relation, error, count=0))
                by_relation[key[0], relation] = replace(known, count=known.count + 1)
        findings = sorted(by_relation.values(), key=lambda finding: KINDS.index(finding.stage))
        causes = [finding for finding in findings if finding.stage not in (RANDOM, *EFFECTS)]
        return causes or findings

    def _tolerance(self, rank: int, key: tuple[str, str], now: int, value: Tensor | None, error: float) -> float:
        """How far a value may be off."""
        kind, _ = key
        # DDP sends rank 0's buffers before each forward, so that a checkpoint needs only these.
        if kind == "buffers" and distance(value, self.unbroken[0].states[now].get(key)) == 0:
            return math.inf
        if not self.nudged or kind in (RANDOM, "batch"):
            return 0.0
        if kind == "rates":
            return FLOOR
        noise = distance(self.nudged[rank].states[now].get(key), self.unbroken[rank].states[now][key])
        dtype = self.unbroken[rank].dtype
        margin = MARGIN_16_BITS if dtype.itemsize == 2 else MARGIN
        # A single number may be where it was by chance.
        return margin * max(torch.finfo(dtype).eps, noise)

    def _relation(self, rank: int, key: tuple[str, str], value: Tensor | None, now: int) -> str:
        """Which step's value it is instead of the right one's."""
        kind, _ = key
        meanings = {
            0: AS_AT_THE_START.get(kind, "it was not loaded"),
            now - 1: "the count of steps is one too low",
            now + 1: "the count of steps is one too high",
        }
        states = self.unbroken[rank].states
        # The likely ones first: a value may be that of several steps.
        for other in [*meanings, *range(len(states))]:
            if other == now or other >= len(states):
                continue
            theirs = states[other].get(key)
            # Before the first step, an optimizer keeps nothing.
            if distance(value, theirs) == 0 or (value is None and theirs is None):
                return f"is that of step {other + 1}, not of step {now + 1}: {meanings.get(other, 'another one')}"
        if kind == "weights" and value is not None and fits(value, torch.bfloat16):
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
                if min((_farthest(other, copy) for other in own.copies[-1]), default=math.inf) > COPY_TOLERANCE:
                    relation = "is not that of a run without a stop: the average (EMA) was not loaded"
                    return [Finding("averages", "a copy of the weights", rank, relation)]
        return []


def _farthest(copy: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(distance(copy[name], value) for name, value in expected.items())


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
    verdict = Verdict(NOT_COMPARABLE, name, len(unbroken), dtype=dtype_name(unbroken[0].dtype), against=ITSELF)
    reason = why_not_watched(unbroken[0])
    if reason:
        return replace(verdict, reason=reason)
    unseeded: set[str] = set()
    for done in range(stop):
        findings = comparison.step(first, done, 0)
        if any(finding.stage != RANDOM for finding in findings):
            reason = f"not deterministic: two starts from the beginning differ in step {done + 1}. Seed all that draws"
            return replace(verdict, reason=reason, findings=tuple(findings))
        unseeded.update(finding.name for finding in findings)
    start = _start(unbroken[0], resumed[0], stop)
    if start == 0:
        reason = (
            "the new start begins with the weights of the first one: no checkpoint was found, or none was written in "
            f"{stop} steps (--stop-after is how many), or it is not loaded"
        )
        return replace(verdict, reason=reason)
    more = min(stop, len(unbroken[0].states) - start)
    verdict = replace(
        verdict,
        layout=f"{name}, {start} steps and {more} after a new start",
        against=f"against {start + more} without a stop",
    )
    notes = []
    if start != stop:
        notes.append(f"stopped after step {stop}, and the weights of the new start are those after step {start}")
    for done in range(more):
        findings = [finding for finding in comparison.step(resumed, done, start) if finding.name not in unseeded]
        if findings and findings[-1].stage != RANDOM:
            first_difference = f"{findings[0].stage} of step {start + done + 1}, number {done + 1} after the new start"
            return replace(
                verdict, result=NOT_SAME, first=first_difference, findings=tuple(findings), notes=tuple(notes)
            )
        if findings and not done:
            notes.append(f"{findings[0].name} was not restored, and nothing in these steps shows it")
    findings = comparison.lost_average(resumed) if start == stop else []
    if findings:
        return replace(verdict, result=NOT_SAME, first="averages of the last step", findings=tuple(findings))
    compared = {"runs": f"deterministic: two starts took the same {stop} steps"}
    counts = Counter(kind for kind, _ in unbroken[0].states[start])
    for kind in KINDS:
        if counts[kind] and kind != RANDOM:
            worst = comparison.worst[kind]
            nearness = f"within {worst:.0e}" if worst else "bit for bit"
            compared[kind] = f"same: {counts[kind]} in each step, {nearness}"
    return replace(verdict, result=SAME, compared=compared, notes=tuple(notes))


def _start(unbroken: States, resumed: States, stop: int) -> int:
    """How many steps made the weights of a new start: those with the nearest weights, if equal those near the stop."""

    def score(done: int) -> tuple[float, int]:
        errors = []
        for key, expected in unbroken.states[done].items():
            if key[0] == "weights":
                errors.append(min(1.0, distance(resumed.states[0].get(key), expected)))
        return sum(errors), abs(done - stop)

    return min(range(len(unbroken.states)), key=score)
