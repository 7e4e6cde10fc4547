"""Private names of autograd: the backward that is under way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread is in a backward, as a forward that is recomputed is.

    Private: torch._C._current_graph_task_id, seen in 2.10 to 2.14; instead: nothing."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that is under way ends.

    Private: Variable._execution_engine.queue_callback, seen in 2.10 to 2.14; instead: nothing."""
    Variable._execution_engine.queue_callback(callback)
