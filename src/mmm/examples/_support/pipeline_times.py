"""What a pipeline's schedule looks like, and how long its ranks waited, beside the formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.pipeline import StageTimes, TimedStage, sum_over_stages
from mmm.parallel.pp.replay import PipelineTimeline, action_lists, replay
from mmm.parallel.pp.schedules import stages_of
from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime.clock import StepClock

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # of time, where all stages take the same
WIDTH = 90  # characters of a chart, or more where an action would have less than two
LEGEND = (
    "F forward, B backward (or I and W, the gradients of input and weights), small: a rank's later stages, · waiting"
)


class PipelineTimes(StageTimes):
    """Tells the clock what a rank's pipeline spends a step on: dtf, dtb, dtw.

    Args:
        clock: of the run.
        stages: of this rank.

    Attributes:
        stages: the same, timed. A schedule takes them, and its loss from `timed_loss`.
    """

    def __init__(self, clock: StepClock, stages: Sequence[PipelineStage]) -> None:
        super().__init__(lambda part: clock.lap(part) if part in clock.parts else None)
        self.stages = [TimedStage(s.submod, s.stage_index, s.num_stages, s.device, group=s.group) for s in stages]
        for stage in self.stages:
            stage.times = self

    def local_loss(self, losses: list[Tensor]) -> Tensor:
        """Sum the losses of a step's micro-batches, which the last stage has, for all stages. A collective."""
        total = sum_over_stages(losses, self.stages[0].device, self.stages[0].group)  # type: ignore[arg-type]
        self.lap("dtw")
        return total


class Timeline(Hook):
    """With ``--timeline``, logs at the end what each rank of the schedule does when, and how long the ranks waited.

    The first step is left out: PyTorch finds the shapes in it.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("dtf", "dtb", "dtw"), np.zeros(1))  # (ranks,) each, on rank 0

    def row(self, run: Run, row: Row) -> None:
        if row.place["iter"] > 0:
            for part, seconds in self.seconds.items():
                self.seconds[part] = seconds + row.per_rank.get(part, 0.0)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and run.config.timeline and run.rank.is_main and not run.comm.dry:
            self._report(run)

    def _report(self, run: Run) -> None:
        """Log the schedule's chart, and the bubble: of stages that take the same time, by the formula, measured."""
        layout = run.layout
        schedule = run.config.schedule
        microbatches = run.config.microbatches
        per_rank = len(run.job.partition.stages) // layout.pp
        stages = [stages_of(rank, layout.pp, schedule, per_rank) for rank in range(layout.pp)]
        ideal = replay(action_lists(schedule, layout.pp, microbatches, stages), lambda action: UNITS[action.kind])
        formula = bubble_formula(schedule, layout.pp, microbatches, per_rank)
        ranks = range(0, layout.ranks, layout.ranks // layout.pp)  # those that rank 0 makes a pipeline with
        waited = (self.seconds["dtw"] / sum(self.seconds.values()))[ranks]
        lines = [f"{schedule}, {microbatches} micro-batches: {LEGEND}"]
        for rank, row, share in zip(ranks, chart(ideal), waited, strict=True):
            lines.append(f"rank {rank:<3} {row}   waited {share:.1%}")
        known = "none" if formula is None else f"{formula:.1%}"
        measured = float(waited.mean())
        lines.append(f"bubble: {ideal.bubble:.1%} in the chart, by the formula {known}, measured {measured:.1%}")
        run.log.info("%s", "\n".join(lines))
        run.describe(bubble={"chart": ideal.bubble, "formula": formula, "measured": measured})


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
