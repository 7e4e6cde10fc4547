"""What the ranks of a pipeline did when, for people: charts, and the bubble beside its formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mmm.analysis.bubble import PipelineTimeline, Recorded, bubble_formula, gather, replay
from mmm.history import plot_timeline
from mmm.history.timeline import Panel, Span, legend_text, timeline_text
from mmm.parallel.pipeline.pipeline import TimedStage, sum_over_stages
from mmm.parallel.pipeline.recorder import Recorder
from mmm.trainer.run import Run


class PipelineTimes:
    """Has PyTorch's stages of a rank tell the clock what a step's time goes into (dtf, dtb, dtw), and notes who did
    what when for `report_timeline`.

    Args:
        schedule: of PyTorch, on `stages`, those of this rank.
    """

    def __init__(self, run: Run, schedule: Any, stages: Sequence[PipelineStage]) -> None:
        self.run, self.stages, self.recorder = run, list(stages), Recorder(run.device, stages[0].group)  # type: ignore[arg-type]
        self.loss, schedule._loss_fn = schedule._loss_fn, self._timed_loss
        self.recording = False
        for stage in self.stages:
            stage.__class__ = TimedStage  # the same stage, with its methods timed
            stage.lap = self._lap  # type: ignore[attr-defined]

    def _lap(self, part: str) -> None:
        if torch.is_grad_enabled() and part in self.run.clock.parts:  # an evaluation is no part of a step
            self.run.clock.lap(part)

    def _timed_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        self._lap("dtw")
        work = partial(self.loss, output, targets)
        value = self.recorder.go_on(work) if self.recording and torch.is_grad_enabled() else work()
        self._lap("dtf")
        return value

    def local_loss(self, losses: list[Tensor]) -> Tensor:
        """Those of a step's micro-batches, by `sum_over_stages`. A collective."""
        total = sum_over_stages(losses, self.run.device, self.stages[0].group)  # type: ignore[arg-type]
        self._lap("dtw")
        return total

    def record(self) -> None:
        """Note what is done in the step that now begins, on all ranks. A collective."""
        self.recording = True
        for stage in self.stages:
            stage.recorder = self.recorder  # type: ignore[attr-defined]
        self.recorder.start()

    def report(self, schedule: str, microbatches: int) -> None:
        """`report_timeline` of the steps that were noted. A collective."""
        report_timeline(self.run, gather(self.recorder), schedule, microbatches, len(self.stages))


def panel(title: str, timeline: PipelineTimeline) -> Panel:
    rows = []
    for row in timeline.rows:
        stages = sorted({box.action.stage for box in row})
        rows.append(
            [
                Span(action.kind, str(action.microbatch), stages.index(action.stage), begin, end)
                for action, begin, end in row
            ]
        )
    return Panel(title, rows)


def bubble_table(replayed: PipelineTimeline, wall: PipelineTimeline, formula: float | None) -> str:
    """A line a rank, how much of the step it waits; and all ranks together, beside the formula."""
    lines = [f"{'waiting':10}{'replayed':>10}{'formula':>10}{'wall':>10}"]
    for rank in range(len(replayed.rows)):
        lines.append(f"{f'rank {rank}':10}{replayed.idle(rank):10.1%}{'':10}{wall.idle(rank):10.1%}")
    known = "none" if formula is None else f"{formula:.1%}"
    return "\n".join([*lines, f"{'all':10}{replayed.bubble:10.1%}{known:>10}{wall.bubble:10.1%}"])


def report_timeline(run: Run, recorded: Recorded, schedule: str, microbatches: int, stages_per_rank: int) -> None:
    """Log the charts and the table, keep the numbers in the record, and draw the picture; on rank 0's pipeline."""
    replayed, pp = replay(recorded.lists, recorded.seconds), len(recorded.lists)
    formula = bubble_formula(schedule, pp, microbatches, stages_per_rank)
    run.describe(bubble={"replayed": replayed.bubble, "formula": formula, "wall": recorded.wall.bubble})
    spent = "CPU time" if run.device.type == "cpu" else "time"
    panels = [
        panel(f"Replayed: each action takes its median {spent}, as soon as its rank and its input are there", replayed),
        panel("Wall clock, last step", recorded.wall),
    ]
    charts = "\n\n".join(timeline_text(p) for p in panels)
    run.log.info(
        "%s, %d micro-batches: %s\n%s\n\n%s",
        schedule,
        microbatches,
        legend_text(panels[0]),
        charts,
        bubble_table(replayed, recorded.wall, formula),
    )
    if run.outdir is not None and run.options.plots:
        title = f"{schedule}, {pp} ranks, {microbatches} micro-batches"
        for file in plot_timeline(panels, title, run.outdir, "pipeline"):
            if file.suffix == ".png":
                run.log.info("timeline: %s", file)
