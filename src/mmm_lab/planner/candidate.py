"""A layout with its techniques and what it would cost: what a search compares, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from mmm.layout import Layout, Techniques
from mmm.units import GIB
from mmm_lab.planner.cost import StepCost
from mmm_lab.planner.trial import Trial

NEAR = 0.02  # of the fastest step: within that the layout with the fewest axes is the answer


@dataclass(frozen=True)
class Candidate:
    """A trial, and what it would cost.

    Attributes:
        kind: its axes and data-parallel technique.
        memory: bytes by part of the rank that needs most. fits: whether those are within the budget.
        host_memory: bytes of a rank on its host. why: in a line, why it is where it is.
    """

    trial: Trial
    kind: str
    memory: Mapping[str, float]
    fits: bool
    cost: StepCost
    tokens_per_second: float
    mfu: float
    host_memory: float = 0.0
    why: str = ""

    @property
    def layout(self) -> Layout:
        return self.trial.layout

    @property
    def techniques(self) -> Techniques:
        return self.trial.techniques

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def largest_part(self) -> str:
        """The part of the memory that is largest, with its GiB."""
        part, size = max(self.memory.items(), key=itemgetter(1))
        return f"{part} {size / GIB:,.1f}"

    @property
    def label(self) -> str:
        """Layout and data-parallel technique, such as ``dp32·tp2 (fsdp)``."""
        return f"{self.layout} ({self.techniques.data_parallel})"

    @property
    def complexity(self) -> tuple[int, bool]:
        """What is to be understood and may go wrong: axes besides dp, two dp axes for one, and whether dp shards."""
        besides = [axis for axis in self.axes if axis != "dp_shard"]
        return len(besides), self.techniques.data_parallel != "ddp"

    @property
    def axes(self) -> list[str]:
        """The axes that have several ranks; offload counts as one."""
        sizes = {**self.layout.sizes, "ep": self.layout.ep}
        several = [axis for axis, size in sizes.items() if size > 1]
        if self.techniques.offload:
            several.append("offload")
        return several


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        best: those that fit, one for each layout: the answer first, the others from the fastest on.
        kinds: the fastest of each kind; where none of a kind fits, the one that needs least.
        refused: kind → why no layout of it goes with model and batch.
        layouts: how many were looked at.
    """

    best: list[Candidate]
    kinds: list[Candidate]
    refused: dict[str, str]
    layouts: int

    @property
    def fastest(self) -> Candidate:
        """The fastest that fits, which may have more axes than the answer."""
        return min(self.best, key=rank_of)


def answer_first(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that fit, from the fastest on; but the first is the simplest of those that are nearly as fast."""
    by_time = sorted(fitting, key=rank_of)
    near = [candidate for candidate in by_time if candidate.cost.seconds <= (1 + NEAR) * by_time[0].cost.seconds]
    if near:
        answer = min(near, key=lambda candidate: candidate.complexity)  # of several that are as simple the fastest
        by_time.remove(answer)
        by_time.insert(0, answer)
    return by_time


def kind_of(layout: Layout, data_parallel: str) -> str:
    if layout.ranks == 1:
        return "one device"
    axes = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    return "·".join([*axes, data_parallel if layout.dp * layout.cp > 1 else "no dp"])


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def rank_of(candidate: Candidate) -> tuple[bool, float]:
    """What decides the order: what fits comes first, and of those the fastest; of the others what needs least."""
    if candidate.fits:
        return False, candidate.cost.seconds
    return True, candidate.bytes


def is_better(one: Candidate, other: Candidate) -> bool:
    return rank_of(one) < rank_of(other)
