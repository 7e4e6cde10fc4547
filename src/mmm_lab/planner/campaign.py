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

from mmm.parallel.footprint import STATE
from mmm.units import counted
from mmm_lab.planner.candidate import Candidate
from mmm_lab.planner.memory import WIDTHS
from mmm_lab.planner.search import Search

SAVED_EVERY = 1800.0  # s between two checkpoints of the line that is printed
KEPT = 2  # checkpoints that stay, as of the trainers' --keep


def steps_for(search: Search, tokens: float) -> int:
    """Steps that make so many tokens, or a few more; of a model with a sequence length."""
    return math.ceil(tokens / (search.global_batch * search.spec.seq_length))


def steps_between_saves(candidate: Candidate, steps: int) -> int:
    """Of a run of so many steps."""
    return max(1, min(steps, round(SAVED_EVERY / candidate.cost.seconds)))


def lines_of(
    search: Search, candidate: Candidate, tokens: float, walltime: float | None, before_end: float
) -> list[str]:
    """The figures, in words.

    Args:
        walltime: seconds of a job, where one is asked for. before_end: of these, what is left for saving.
    """
    steps = steps_for(search, tokens)
    seconds = steps * candidate.cost.seconds
    hours = seconds / 3600
    node_hours = search.machine.hosts * hours
    time = f"{hours / 24:,.1f} days" if hours >= 24 else f"{hours:.3g} hours"
    spent = f"{node_hours:,.0f}" if node_hours >= 100 else f"{node_hours:.3g}"
    lines = [f"{tokens:,.0f} tokens: {counted(steps, 'step')}, {time} of steps, {spent} node-hours"]
    if walltime is not None:
        jobs = math.ceil(seconds / (walltime - before_end))
        saving = f"the last {before_end / 60:g} min are for saving"
        lines.append(f"{counted(jobs, 'job')} of {walltime / 3600:g} h, of which {saving}; start-up comes on top")
    storage, _ = WIDTHS[search.dtype]
    size = search.spec.parameters * storage * (1 + STATE[search.optimizer])
    disk = f"{_size(KEPT * size)}, and {_size((KEPT + 1) * size)} while one is written"
    lines.append(f"a checkpoint is {_size(size)}; {KEPT} stay (--keep), {disk}")
    return lines


def _size(size: float) -> str:
    for name, unit in (("TB", 1e12), ("GB", 1e9)):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1e6:,.2f} MB"
