"""What a run over a number of tokens takes on a layout: steps, time, node-hours, jobs, and disk for its checkpoints.

::

    steps       = tokens / (global batch · sequence length), rounded up
    time        = steps · seconds of a step
    node-hours  = hosts · hours
    jobs        = time / (walltime - time before its end that is kept for saving), rounded up
    checkpoint  = parameters · bytes of an element · (1 + elements of optimizer state for each parameter)

The time does not include start-up, validation and saving. After a kill, the steps since the last checkpoint are
repeated.
"""

from __future__ import annotations

import math

from mmm.optim.adamw import STATE
from mmm.units import counted
from mmm_lab.planner.candidate import Candidate
from mmm_lab.planner.memory import WIDTHS
from mmm_lab.planner.search import Search

SAVED_EVERY = 1800.0  # s between two checkpoints in the line that is printed
KEPT = 2  # checkpoints that stay on disk, the default of the trainers' --keep


def steps_for(search: Search, tokens: float) -> int:
    """Number of steps that see at least `tokens` tokens, for a language model."""
    return math.ceil(tokens / (search.global_batch * search.spec.seq_length))


def steps_between_saves(candidate: Candidate, steps: int) -> int:
    """Number of steps between two checkpoints of a run of `steps` steps."""
    return max(1, min(steps, round(SAVED_EVERY / candidate.cost.seconds)))


def jobs_for(candidate: Candidate, steps: int, walltime: float, before_end: float) -> int:
    """Number of jobs in which so many steps are made.

    Args:
        walltime: seconds of a job.
        before_end: seconds before the end of a job that are kept for saving.
    """
    return math.ceil(steps * candidate.cost.seconds / (walltime - before_end))


def lines_of(
    search: Search,
    candidate: Candidate,
    tokens: float,
    walltime: float | None,
    before_end: float,
) -> list[str]:
    """The figures as lines of text.

    Args:
        walltime: seconds of a job; None if it was not given.
        before_end: seconds before the end of a job that are kept for saving.
    """
    steps = steps_for(search, tokens)
    seconds = steps * candidate.cost.seconds
    hours = seconds / 3600
    node_hours = search.machine.hosts * hours
    time = f"{hours:.3g} hours"
    if hours >= 24:
        time = f"{hours / 24:,.1f} days"
    spent = f"{node_hours:.3g}"
    if node_hours >= 100:
        spent = f"{node_hours:,.0f}"
    lines = [f"{tokens:,.0f} tokens: {counted(steps, 'step')}, {time} of steps, {spent} node-hours"]
    if walltime is not None:
        jobs = jobs_for(candidate, steps, walltime, before_end)
        saving = f"the last {before_end / 60:g} min are for saving"
        lines.append(f"{counted(jobs, 'job')} of {walltime / 3600:g} h, of which {saving}; start-up comes on top")
    # Parameters and optimizer state are saved in the dtype that they are stored in.
    storage, _ = WIDTHS[search.dtype]
    size = search.spec.parameters * storage * (1 + STATE[search.optimizer])
    # A checkpoint is deleted only when the next one is complete.
    disk = f"{_size(KEPT * size)}, and {_size((KEPT + 1) * size)} while one is written"
    lines.append(f"a checkpoint is {_size(size)}; {KEPT} stay (--keep), {disk}")
    return lines


def _size(size: float) -> str:
    """Bytes in MB, GB or TB."""
    for name, unit in (("TB", 1e12), ("GB", 1e9)):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1e6:,.2f} MB"
