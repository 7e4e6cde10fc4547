"""What is planned: techniques on a layout, the stages of its pipeline, and the batch that goes through them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.parallel.pp.schedules import stages_of
from mmm_lab.planner.spec import ModelSpec


@dataclass(frozen=True)
class PlannedStage:
    """What one pipeline rank has. kinds: kind of part → how many. own: how many stages. number: its coordinate."""

    kinds: tuple[tuple[int, int], ...]
    number: int
    has_head: bool
    last_kind: int
    own: int = 1


@dataclass(frozen=True)
class Trial:
    """One way to train a model, for which memory, bytes and seconds are computed.

    Attributes:
        stages: of the pipeline ranks that differ; without a pipeline the full model alone.
        local_batch: samples of a step, of a data-parallel coordinate.
    """

    layout: Layout
    techniques: Techniques
    stages: tuple[PlannedStage, ...]
    local_batch: int

    @property
    def microbatches(self) -> int:
        return self.techniques.microbatches or 1

    @property
    def batch(self) -> int:
        """Samples of a micro-batch; of the largest, where they differ."""
        return -(-self.local_batch // self.microbatches)

    @property
    def unsharded(self) -> bool:
        """Whether each rank has all parameters that pp, tp and ep leave it."""
        return self.techniques.data_parallel in UNSHARDED

    @property
    def ulysses(self) -> int:
        """Ranks of cp that shard heads among them."""
        return self.techniques.ulysses_size(self.layout.cp)


def stages_for(spec: ModelSpec, splits: list[range], schedule: str, pp: int) -> list[PlannedStage]:
    """What each pipeline rank has, by coordinate.

    Args:
        splits: the parts of each stage. schedule: which says which rank has which stage.
    """
    own = len(splits) // pp
    stages = []
    for coordinate in range(pp):
        numbers = stages_of(coordinate, pp, schedule, own)
        kinds = Counter(spec.sequence[part] for number in numbers for part in splits[number])
        has_head = len(splits) - 1 in numbers
        last = spec.sequence[splits[max(numbers)][-1]]
        stages.append(PlannedStage(tuple(sorted(kinds.items())), coordinate, has_head, last, own))
    return stages


def distinct(stages: list[PlannedStage]) -> list[PlannedStage]:
    """Of stages that are alike the first, which has the most micro-batches under way."""
    first: dict[tuple[object, ...], PlannedStage] = {}
    for stage in stages:
        first.setdefault((stage.kinds, stage.has_head, stage.last_kind), stage)
    return list(first.values())


def full_model(spec: ModelSpec) -> PlannedStage:
    """The only stage of a run without a pipeline."""
    kinds = Counter(spec.sequence)
    return PlannedStage(tuple(sorted(kinds.items())), 0, True, spec.sequence[-1])
