"""What a pipeline's schedule looks like, and how long its ranks waited, beside the formula."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.pipeline import StageTimes, TimedStage, sum_over_stages
from mmm.parallel.pp.replay import PipelineTimeline, action_lists, replay
from mmm.parallel.pp.schedules import stages_of
from mmm.runtime.clock import StepClock
from mmm.runtime.device import synchronize
from mmm.runtime.log import get_logger

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # of time, where all stages take the same
WIDTH = 90  # characters of a chart, or more where an action would have less than two
LEGEND = (
    "F forward, B backward (or I and W, the gradients of input and weights), small: a rank's later stages, · waiting"
)


class PipelineTimes(StageTimes):
    """Tells the clock what a rank's pipeline spends a step on (dtf, dtb, dtw), and sums it up for `report`.

    Args:
        clock: of the run. stages: of this rank.

    Attributes:
        stages: the same, timed: a schedule takes them, and its loss from `timed_loss`.
    """

    def __init__(self, clock: StepClock, stages: Sequence[PipelineStage]) -> None:
        super().__init__(lambda part: clock.lap(part) if part in clock.parts else None)
        self.clock, self.group = clock, stages[0].group
        self.stages = [TimedStage(s.submod, s.stage_index, s.num_stages, s.device, group=s.group) for s in stages]
        for stage in self.stages:
            stage.times = self
        self._seconds = {"dtf": 0.0, "dtb": 0.0, "dtw": 0.0}  # of the steps that `record` has begun
        self._last: float | None = None  # mark, of such a step

    def lap(self, part: str) -> None:
        super().lap(part)
        if self._last is not None and torch.is_grad_enabled():
            synchronize(self.clock.device)
            now = perf_counter()
            self._seconds[part] += now - self._last
            self._last = now

    def local_loss(self, losses: list[Tensor]) -> Tensor:
        """Those of a step's micro-batches, by `sum_over_stages`. A collective."""
        total = sum_over_stages(losses, self.clock.device, self.group)  # type: ignore[arg-type]
        self.lap("dtw")
        return total

    def record(self) -> None:
        """The step that now begins counts for `report`."""
        synchronize(self.clock.device)
        self._last = perf_counter()

    def report(self, schedule: str, microbatches: int) -> dict[str, float | None]:
        """Log the schedule's chart, and the bubble: of stages that take the same time, by the formula, measured. A
        collective.

        Returns:
            The three, for the record.
        """
        ranks = dist.get_process_group_ranks(self.group)
        stages = [stages_of(place, len(ranks), schedule, len(self.stages)) for place in range(len(ranks))]
        lists = action_lists(schedule, len(ranks), microbatches, stages)
        ideal = replay(lists, lambda action: UNITS[action.kind])
        formula = bubble_formula(schedule, len(ranks), microbatches, len(self.stages))
        waited: list[Any] = [None] * len(ranks)
        dist.all_gather_object(waited, self._seconds["dtw"] / sum(self._seconds.values()), group=self.group)
        lines = [f"{schedule}, {microbatches} micro-batches: {LEGEND}"]
        for rank, row, share in zip(ranks, chart(ideal), waited, strict=True):
            lines.append(f"rank {rank:<3} {row}   waited {share:.1%}")
        known = "none" if formula is None else f"{formula:.1%}"
        lines.append(f"bubble: {ideal.bubble:.1%} in the chart, by the formula {known}, measured {mean(waited):.1%}")
        get_logger().info("%s", "\n".join(lines))
        return {"chart": ideal.bubble, "formula": formula, "measured": mean(waited)}


def chart(timeline: PipelineTimeline) -> list[str]:
    """A line a rank, whose actions take whole units of time: ``F3─`` is forward of micro-batch 3."""
    units = round(timeline.seconds)
    width = max(2, WIDTH // units)
    lines = []
    for row in timeline.rows:
        first_stage = min(action.stage for action, _, _ in row)
        cells = ["·"] * (width * units)
        for action, begin, end in row:
            kind = action.kind if action.stage == first_stage else action.kind.lower()
            room = width * round(end - begin)
            start = width * round(begin)
            cells[start : start + room] = list(f"{kind}{action.microbatch}".ljust(room, "─")[:room])
        lines.append("".join(cells))
    return lines
