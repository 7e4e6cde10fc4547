"""What a pipeline's schedule looks like, how long its ranks waited, and what the formula says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.pipeline import StageTimes, TimedStage, sum_over_stages
from mmm.parallel.pp.replay import Action, PipelineTimeline, action_lists, replay
from mmm.parallel.pp.schedules import stages_of
from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime.clock import StepClock

# Units of time that the actions take in a chart, where all stages take the same time.
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
# Characters in a line of a chart. It has more where an action would get fewer than two.
WIDTH = 90
LEGEND = (
    "F forward, B backward (or I and W, the gradients of input and weights), small: a rank's later stages, · waiting"
)


class PipelineTimes(StageTimes):
    """Tells the clock how long a rank's pipeline spends on forward (dtf), on backward (dtb) and waiting (dtw).

    Args:
        clock: the clock of the run.
        stages: the stages of this rank.

    Attributes:
        stages: timed versions of the stages. A schedule takes these, and its loss from `timed_loss`.
    """

    def __init__(self, clock: StepClock, stages: Sequence[PipelineStage]) -> None:
        def lap(name: str) -> None:
            if name in clock.parts:
                clock.lap(name)

        super().__init__(lap)
        self.stages = []
        for stage in stages:
            timed = TimedStage(
                stage.submod,
                stage.stage_index,
                stage.num_stages,
                stage.device,
                group=stage.group,
            )
            timed.times = self
            self.stages.append(timed)

    def local_loss(self, losses: list[Tensor]) -> Tensor:
        """Sum the losses of a step's micro-batches. A collective of the ranks along pp.

        Args:
            losses: the losses on the last stage; empty on the others.

        Returns:
            The sum, on every stage.
        """
        total = sum_over_stages(losses, self.stages[0].device, self.stages[0].group)  # type: ignore[arg-type]
        # The other stages have waited for the last one.
        self.lap("dtw")
        return total


class Timeline(Hook):
    """With ``--timeline``, logs at the end what each rank of the schedule does when, and how long the ranks waited.

    The first step is left out: PyTorch finds the shapes in it.
    """

    def __init__(self) -> None:
        # Seconds of all steps so far, (ranks,) each, on rank 0.
        self.seconds = dict.fromkeys(("dtf", "dtb", "dtw"), np.zeros(1))

    def before(self, run: Run) -> None:
        if run.config.timeline:
            # What has no chart is refused before it trains.
            self._actions(run)

    def row(self, run: Run, row: Row) -> None:
        if row.place["iter"] > 0:
            for name, seconds in self.seconds.items():
                self.seconds[name] = seconds + row.per_rank.get(name, 0.0)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and run.config.timeline and run.rank.is_main and not run.comm.dry:
            self._report(run)

    def _actions(self, run: Run) -> list[list[Action]]:
        """What each rank does in a step, in order, by coordinate on pp."""
        pp = run.layout.pp
        stages_per_rank = len(run.job.partition.stages) // pp
        stages = [stages_of(rank, pp, run.config.schedule, stages_per_rank) for rank in range(pp)]
        return action_lists(run.config.schedule, pp, run.config.microbatches, stages)

    def _report(self, run: Run) -> None:
        """Log the schedule's chart, and the bubble in the chart, by the formula, and as measured."""
        pp = run.layout.pp
        schedule = run.config.schedule
        microbatches = run.config.microbatches
        stages_per_rank = len(run.job.partition.stages) // pp
        # The schedule as it would run if all stages took the same time.
        ideal = replay(self._actions(run), lambda action: UNITS[action.kind])
        formula = bubble_formula(schedule, pp, microbatches, stages_per_rank)
        # pp is the outermost axis: these ranks make up the pipeline of rank 0.
        ranks = range(0, run.layout.ranks, run.layout.ranks // pp)
        waited = self.seconds["dtw"] / sum(self.seconds.values())
        waited = waited[ranks]
        lines = [f"{schedule}, {microbatches} micro-batches: {LEGEND}"]
        for rank, row, share in zip(ranks, chart(ideal), waited, strict=True):
            lines.append(f"rank {rank:<3} {row}   waited {share:.1%}")
        by_formula = "none"
        if formula is not None:
            by_formula = f"{formula:.1%}"
        measured = float(waited.mean())
        lines.append(f"bubble: {ideal.bubble:.1%} in the chart, by the formula {by_formula}, measured {measured:.1%}")
        run.log.info("%s", "\n".join(lines))
        bubble = {
            "chart": ideal.bubble,
            "formula": formula,
            "measured": measured,
        }
        run.describe(bubble=bubble)


def chart(timeline: PipelineTimeline) -> list[str]:
    """Draw a timeline as text, a line per rank: ``F3─`` is the forward of micro-batch 3.

    Args:
        timeline: actions that take whole units of time.
    """
    units = round(timeline.seconds)
    chars_per_unit = max(2, WIDTH // units)
    lines = []
    for row in timeline.rows:
        first_stage = min(action.stage for action, _, _ in row)
        line = ["·"] * (chars_per_unit * units)
        for action, begin, end in row:
            kind = action.kind
            # The later stages of a rank are written in small letters.
            if action.stage != first_stage:
                kind = kind.lower()
            start = chars_per_unit * round(begin)
            length = chars_per_unit * round(end - begin)
            text = f"{kind}{action.microbatch}".ljust(length, "─")
            line[start : start + length] = text[:length]
        lines.append("".join(line))
    return lines
