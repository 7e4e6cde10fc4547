"""A layout with its techniques and what it would cost: what a search compares, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mmm.layout import Layout, Techniques
from mmm_lab.planner.cost import StepCost
from mmm_lab.planner.memory import PlannedStage

EQUAL = 0.01  # step times that differ by less count as equal: then the simpler layout comes first


@dataclass(frozen=True)
class Candidate:
    """A layout with its techniques, and what it would cost.

    Attributes:
        kind: its axes and data-parallel technique. local_batch: samples of a step, of a data-parallel coordinate.
        memory: bytes by part of the rank that needs most. fits: whether those are within the budget. host_memory: bytes
            of a rank on its host. why: in a line, why it is where it is.
    """

    layout: Layout
    techniques: Techniques
    kind: str
    local_batch: int
    memory: Mapping[str, float]
    fits: bool
    cost: StepCost
    tokens_per_second: float
    mfu: float
    host_memory: float = 0.0
    why: str = ""

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def microbatches(self) -> int:
        return self.techniques.microbatches or 1


@dataclass(frozen=True)
class Choice:
    """Techniques on a layout. seconds: of a step without data parallelism. stages: of the pipeline ranks that differ.
    batch: samples of a micro-batch."""

    seconds: float
    techniques: Techniques
    stages: tuple[PlannedStage, ...]
    batch: int

    @property
    def microbatches(self) -> int:
        return self.techniques.microbatches or 1


@dataclass(frozen=True)
class Found:
    """What a search has found. best: those that fit, fastest first, one a layout. kinds: of each kind the best, also
    where none fits. refused: kind → why no layout of it goes with model and batch. layouts: how many were looked at."""

    best: list[Candidate]
    kinds: list[Candidate]
    refused: dict[str, str]
    layouts: int


def kind_of(layout: Layout, data_parallel: str) -> str:
    axes = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    single = layout.ranks == 1
    return "one device" if single else "·".join([*axes, data_parallel if layout.dp * layout.cp > 1 else "no dp"])


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def rank_of(candidate: Candidate) -> tuple[object, ...]:
    """What decides the order: what fits first; of equals what has fewer axes."""
    if not candidate.fits:
        return (True, candidate.bytes, 0, 0.0)
    alike = round(math.log(candidate.cost.seconds) / math.log(1 + EQUAL))
    return (False, alike, candidate.kind.count("·") + (candidate.layout.dp_replicate > 1), candidate.cost.seconds)


def is_better(one: Candidate, other: Candidate) -> bool:
    return rank_of(one) < rank_of(other)
