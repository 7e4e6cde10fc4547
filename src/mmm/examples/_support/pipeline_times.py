"""What the ranks of a pipeline did when, for people: charts, and the bubble beside its formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mmm.history.plots.timeline import Panel, Span, legend_text, plot_timeline, timeline_text
from mmm.parallel.pp.bubble import bubble_formula
from mmm.parallel.pp.pipeline import StageTimes, TimedStage, sum_over_stages
from mmm.parallel.pp.recorder import Action, Recorder
from mmm.parallel.pp.replay import PipelineTimeline, gather, replay
from mmm.runtime.clock import StepClock
from mmm.runtime.log import get_logger


class PipelineTimes(StageTimes):
    """Tells the clock what a rank's pipeline spends a step on (dtf, dtb, dtw), and notes who did what when for
    `report`.

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

    def local_loss(self, losses: list[Tensor]) -> Tensor:
        """Those of a step's micro-batches, by `sum_over_stages`. A collective."""
        total = sum_over_stages(losses, self.clock.device, self.group)  # type: ignore[arg-type]
        self.lap("dtw")
        return total

    def record(self) -> None:
        """Note what is done in the step that now begins, on all ranks. A collective."""
        if self.recorder is None:
            self.recorder = Recorder(self.clock.device, self.group)  # type: ignore[arg-type]
        self.recorder.start()

    def report(self, schedule: str, microbatches: int, outdir: Path | None) -> dict[str, float | None]:
        """Log the charts and the table of the steps that were noted, and draw the picture under `outdir`, if any. A
        collective.

        Returns:
            The bubble for the record: replayed, by the formula, and by the wall clock.
        """
        assert self.recorder is not None
        recorded, log = gather(self.recorder), get_logger()
        replayed, pp = replay(recorded.lists, recorded.seconds), len(recorded.lists)
        formula = bubble_formula(schedule, pp, microbatches, len(self.stages))
        ideal = replay(recorded.lists, alike(recorded.seconds))
        spent = "CPU time" if self.clock.device.type == "cpu" else "time"
        caption = f"Replayed: each action takes its median {spent}, as soon as rank and input are there"
        ranks, last = dist.get_process_group_ranks(self.group), max(ideal.seconds, replayed.seconds)
        panels = [
            panel("Ideal: all stages take the same time", ideal, ranks, last),
            panel(caption, replayed, ranks, last),
            panel("Wall clock, last step", recorded.wall, ranks),
        ]
        charts = "\n\n".join(timeline_text(p) for p in panels)
        heading = f"{schedule}, {microbatches} micro-batches: {legend_text(panels[0])}"
        log.info("%s\n%s\n\n%s", heading, charts, bubble_table(replayed, recorded.wall, formula, ranks))
        title = f"{schedule}, {microbatches} micro-batches, {of_ranks(ranks, dist.get_world_size())}"
        for file in plot_timeline(panels, title, outdir, "pipeline") if outdir is not None else ():
            if file.suffix == ".png":
                log.info("timeline: %s", file)
        return {"replayed": replayed.bubble, "formula": formula, "wall": recorded.wall.bubble}


def alike(seconds: Mapping[Action, float]) -> dict[Action, float]:
    """Of each action what those of its kind take on average over all stages."""
    kinds: dict[str, list[float]] = {}
    for action, taken in seconds.items():
        kinds.setdefault(action.kind, []).append(taken)
    return {action: mean(kinds[action.kind]) for action in seconds}


def of_ranks(ranks: Sequence[int], world_size: int) -> str:
    """``4 ranks``, or ``pipeline of ranks 0 and 2, of 4``."""
    if len(ranks) == world_size:
        return f"{world_size} ranks"
    return f"pipeline of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}, of {world_size}"


def panel(title: str, timeline: PipelineTimeline, ranks: Sequence[int] = (), until: float = 0.0) -> Panel:
    """The chart of a timeline; its title also says the bubble."""
    rows = []
    for row in timeline.rows:
        stages = sorted({box.action.stage for box in row})
        rows.append(
            [
                Span(action.kind, str(action.microbatch), stages.index(action.stage), begin, end)
                for action, begin, end in row
            ]
        )
    return Panel(f"{title}. Bubble {timeline.bubble:.1%}", rows, ranks, until)


def bubble_table(
    replayed: PipelineTimeline, wall: PipelineTimeline, formula: float | None, ranks: Sequence[int]
) -> str:
    """A line a rank, how much of the step it waits; and all ranks together, beside the formula."""
    lines = [f"{'waiting':10}{'replayed':>10}{'formula':>10}{'wall':>10}"]
    for place, rank in enumerate(ranks):
        lines.append(f"{f'rank {rank}':10}{replayed.idle(place):10.1%}{'':10}{wall.idle(place):10.1%}")
    known = "none" if formula is None else f"{formula:.1%}"
    return "\n".join([*lines, f"{'all':10}{replayed.bubble:10.1%}{known:>10}{wall.bubble:10.1%}"])
