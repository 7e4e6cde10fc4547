"""Private names of autograd, about the backward pass that is running."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread runs a backward pass. So does a forward that activation checkpointing recomputes.

    Private: torch._C._current_graph_task_id, seen in 2.10 to 2.14. No public replacement.
    """
    # -1: no backward pass runs in this thread.
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running ends.

    Private: Variable._execution_engine.queue_callback, seen in 2.10 to 2.14. No public replacement.
    """
    Variable._execution_engine.queue_callback(callback)
