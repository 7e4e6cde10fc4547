"""A layout with its techniques and its predicted cost: what the search compares, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from mmm.layout import Layout, Techniques
from mmm.units import GIB
from mmm_lab.layout_name import split_axes
from mmm_lab.planner.cost import StepCost
from mmm_lab.planner.trial import Trial

# Among layouts whose step takes at most this fraction longer than the fastest, the simplest is the answer.
NEAR = 0.02


@dataclass(frozen=True)
class Candidate:
    """A way to train the model, with its predicted memory and time.

    Attributes:
        kind: names of its axes and of its data-parallel technique, such as ``pp·tp·fsdp``.
        memory: bytes of each part of memory, on the rank that needs most.
        fits: whether device and host have enough memory.
        host_memory: bytes of host memory that one rank takes; 0 without offload.
        why: one line that says why it is the answer, or why it is not.
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
        """Bytes of device memory on the rank that needs most."""
        return sum(self.memory.values())

    @property
    def largest_part(self) -> str:
        """The largest part of the memory, with its size in GiB."""
        name, size = max(self.memory.items(), key=itemgetter(1))
        return f"{name}: {size / GIB:,.1f}"

    @property
    def label(self) -> str:
        """Layout and data-parallel technique, such as ``dp32·tp2 (fsdp)``."""
        return f"{self.layout} ({self.techniques.data_parallel})"

    @property
    def complexity(self) -> tuple[int, bool]:
        """How much a person has to understand: the number of axes besides dp_shard, then whether dp shards."""
        other_axes = [axis for axis in self.axes if axis != "dp_shard"]
        return len(other_axes), self.techniques.data_parallel != "ddp"

    @property
    def axes(self) -> list[str]:
        """The axes that have several ranks; offload counts as one."""
        axes = split_axes(self.layout)
        if self.techniques.offload:
            axes.append("offload")
        return axes


@dataclass(frozen=True)
class SearchResult:
    """What the search found.

    Attributes:
        best: one candidate for each layout that fits. The answer comes first, then the others by step time.
        kinds: the fastest candidate of each kind; if none of a kind fits, the one that needs least memory.
        refused: for each kind without a candidate, why none of its layouts goes with this model and batch.
        layouts: number of layouts that were looked at.
    """

    best: list[Candidate]
    kinds: list[Candidate]
    refused: dict[str, str]
    layouts: int

    @property
    def fastest(self) -> Candidate:
        """The fastest candidate that fits. It may have more axes than the answer."""
        return min(self.best, key=rank_of)


def answer_first(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates that fit by step time, but put the simplest of the nearly fastest ones first."""
    by_time = sorted(fitting, key=rank_of)
    if not by_time:
        return []
    limit = (1 + NEAR) * by_time[0].cost.seconds
    # Seconds are predictions: a difference of this size is not worth more axes.
    nearly_fastest = [candidate for candidate in by_time if candidate.cost.seconds <= limit]
    # `min` takes the first of those that are equally simple, which is the fastest of them.
    answer = min(nearly_fastest, key=lambda candidate: candidate.complexity)
    by_time.remove(answer)
    return [answer, *by_time]


def kind_of(layout: Layout, data_parallel: str) -> str:
    """The name of a layout's kind, such as ``pp·tp·fsdp``: its axes without their sizes."""
    if layout.ranks == 1:
        return "one device"
    names = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    # Gradients are summed over cp as well, so that a technique is at work where there is cp but no dp.
    if layout.dp * layout.cp > 1:
        names.append(data_parallel)
    else:
        names.append("no dp")
    return "·".join(names)


def rank_of(candidate: Candidate) -> tuple[bool, float]:
    """Sorting key: candidates that fit come first, by step time; then the others, by the memory that they need."""
    if candidate.fits:
        return False, candidate.cost.seconds
    return True, candidate.bytes
