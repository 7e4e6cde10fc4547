"""What a run of so many tokens takes on a layout: steps, time, node-hours, jobs, and what its checkpoints are on disk.

::

    steps       = tokens / (global batch · sequence length), rounded up
    time        = steps · seconds of a step
    node-hours  = hosts · hours
    jobs        = time / (walltime - what is kept free before its end for saving), rounded up
    checkpoint  = parameters · bytes of an element · (1 + elements of optimizer state for each)

Start-up, validation and the saving itself are not in the time. A job that is killed makes up to a checkpoint's interval
of steps again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmm_lab.planner.candidate import Candidate
from mmm_lab.planner.memory import STATE, WIDTHS
from mmm_lab.planner.search import Search

SAVED_EVERY = 1800.0  # s between two checkpoints of the line that is printed
KEPT = 2  # checkpoints that stay, as of the trainers' --keep


@dataclass(frozen=True)
class RunCost:
    """
    Attributes:
        tokens: that were asked for. steps: that make as many, or a few more.
        seconds: of all steps. hosts: that are busy meanwhile.
        checkpoint: bytes of one. interval: steps between two.
    """

    tokens: float
    steps: int
    seconds: float
    hosts: int
    checkpoint: float
    interval: int

    @property
    def node_hours(self) -> float:
        return self.hosts * self.seconds / 3600

    def jobs(self, walltime: float, before_end: float) -> int:
        """How many jobs of `walltime` seconds make the steps, each of which saves `before_end` before its end."""
        return math.ceil(self.seconds / (walltime - before_end))


def run_cost(search: Search, candidate: Candidate, tokens: float) -> RunCost:
    """What `tokens` take on a layout; of a model with a sequence length."""
    steps = math.ceil(tokens / (search.global_batch * search.spec.seq_length))
    storage, _ = WIDTHS[search.dtype]
    checkpoint = search.spec.parameters * storage * (1 + STATE[search.optimizer])
    interval = max(1, min(steps, round(SAVED_EVERY / candidate.cost.seconds)))
    return RunCost(tokens, steps, steps * candidate.cost.seconds, search.machine.hosts, checkpoint, interval)


def lines_of(cost: RunCost, walltime: float | None, before_end: float) -> list[str]:
    """The figures, in words. `walltime`: seconds of a job, where one is asked for."""
    days = cost.seconds / 86400
    long = f"{days:,.1f} days" if days >= 1 else f"{cost.seconds / 3600:.3g} hours"
    lines = [
        f"{cost.tokens:,.0f} tokens: {cost.steps:,} steps, {long} of steps, "
        f"{f'{cost.node_hours:,.0f}' if cost.node_hours >= 100 else f'{cost.node_hours:.3g}'} node-hours"
    ]
    if walltime is not None:
        jobs = cost.jobs(walltime, before_end)
        lines.append(
            f"{jobs:,} job{'s' * (jobs > 1)} of {walltime / 3600:g} h, of which the last {before_end / 60:g} min are "
            "for saving; start-up comes on top"
        )
    size = cost.checkpoint
    lines.append(
        f"a checkpoint is {_size(size)}; {KEPT} stay (--keep), {_size(KEPT * size)}, and {_size((KEPT + 1) * size)} "
        "while one is written"
    )
    return lines


def _size(size: float) -> str:
    name, unit = next(((name, unit) for name, unit in (("TB", 1e12), ("GB", 1e9)) if size >= unit), ("MB", 1e6))
    return f"{size / unit:,.2f} {name}"
