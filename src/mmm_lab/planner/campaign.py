"""What a run over a number of tokens takes on a layout: steps, time, node-hours, and disk for its checkpoints.

::

    steps       = tokens / (global batch · sequence length), rounded up
    time        = steps · seconds of a step
    node-hours  = hosts · hours
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

GB = 1e9
KEPT = 2  # checkpoints that stay on disk, the default of the trainers' --keep


def lines_of(search: Search, candidate: Candidate, tokens: float) -> list[str]:
    """The figures of a language model's run over `tokens` tokens, as lines of text."""
    steps = math.ceil(tokens / (search.global_batch * search.spec.seq_length))
    hours = steps * candidate.cost.seconds / 3600
    time = f"{hours:.3g} hours"
    if hours >= 24:
        time = f"{hours / 24:,.1f} days"
    # Parameters and optimizer state are saved in the dtype that they are stored in.
    storage, _ = WIDTHS[search.dtype]
    size = search.spec.parameters * storage * (1 + STATE[search.optimizer]) / GB
    # A checkpoint is deleted only when the next one is complete.
    disk = f"{KEPT * size:,.2f} GB, and {(KEPT + 1) * size:,.2f} GB while one is written"
    return [
        f"{tokens:,.0f} tokens: {counted(steps, 'step')}, {time} of steps, "
        f"{search.machine.hosts * hours:,.1f} node-hours; start-up and waiting come on top",
        f"a checkpoint is {size:,.2f} GB; {KEPT} stay (--keep), {disk}",
    ]
