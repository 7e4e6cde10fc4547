"""What is planned: techniques on a layout, the stages of its pipeline, and the batch that goes through them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.parallel.pp.schedules import stages_of
from mmm.parallel.pp.stages import boundaries_of
from mmm_lab.planner.spec import ModelSpec


@dataclass(frozen=True)
class PlannedStage:
    """The parts of the model that one pipeline rank has.

    Attributes:
        kinds: pairs of a kind of part and how many of it the rank has.
        coordinate: the rank's coordinate on pp.
        has_head: whether the rank computes the loss.
        last_kind: kind of the last part of its last stage.
        layers: how many layers the rank has.
        n_stages: number of stages of the schedule that it has.
        boundaries: how many boundaries with stages of other ranks it has.
    """

    kinds: tuple[tuple[int, int], ...]
    coordinate: int
    has_head: bool
    last_kind: int
    layers: int
    n_stages: int
    boundaries: int = 0


@dataclass(frozen=True)
class Trial:
    """One way to train a model, for which memory, bytes and seconds are computed.

    Attributes:
        stages: one of each kind of pipeline rank; without a pipeline, the full model.
        local_batch: number of samples in a step for one data-parallel coordinate.
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
        """Number of samples in the largest micro-batch."""
        return -(-self.local_batch // self.microbatches)

    @property
    def unsharded(self) -> bool:
        """Whether each rank has all parameters that pp, tp and ep leave it."""
        return self.techniques.data_parallel in UNSHARDED

    @property
    def ulysses(self) -> int:
        """Number of cp ranks that shard the attention heads among them."""
        return self.techniques.ulysses_size(self.layout.cp)


def stages_for(
    spec: ModelSpec,
    splits: list[range],
    schedule: str,
    pp: int,
) -> list[PlannedStage]:
    """The parts that each pipeline rank has, by coordinate.

    Args:
        splits: indices of the model's parts that each stage has.
        schedule: name of the schedule, which decides which rank has which stage.
    """
    n_stages = len(splits) // pp
    planned = []
    for coordinate in range(pp):
        stages = stages_of(coordinate, pp, schedule, n_stages)
        # How many parts of each kind, over all stages of this rank.
        kinds = Counter(spec.sequence[index] for stage in stages for index in splits[stage])
        # The last stage of the model computes the loss.
        has_head = len(splits) - 1 in stages
        last_part = splits[max(stages)][-1]
        planned.append(
            PlannedStage(
                kinds=tuple(sorted(kinds.items())),
                coordinate=coordinate,
                has_head=has_head,
                last_kind=spec.sequence[last_part],
                layers=sum(count for kind, count in kinds.items() if spec.kinds[kind].role == "layer"),
                n_stages=n_stages,
                boundaries=boundaries_of(stages, len(splits)),
            )
        )
    return planned


def distinct(stages: list[PlannedStage]) -> list[PlannedStage]:
    """Drop stages with the same parts as an earlier one, which has more micro-batches under way."""
    # Earlier ranks start earlier, and so hold more micro-batches.
    first: dict[tuple[object, ...], PlannedStage] = {}
    for stage in stages:
        first.setdefault((stage.kinds, stage.has_head, stage.last_kind), stage)
    return list(first.values())


def full_model(spec: ModelSpec) -> PlannedStage:
    """The only stage of a run without a pipeline."""
    return stages_for(spec, [range(len(spec.sequence))], "1F1B", 1)[0]
