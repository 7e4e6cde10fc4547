"""The actions of a pipeline's rank, and their seconds, noted while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mmm.runtime.device import synchronize


class Action(NamedTuple):
    """kind: F, B, I or W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ActionSpan(NamedTuple):
    """An action, and when: in seconds."""

    action: Action
    begin: float
    end: float


class Recorder:
    """The actions of a rank as they happen, for `StageTimes`.

    The seconds of an action are CPU time of the thread that runs it, which ranks that share cores do not lengthen; on
    an accelerator, where CPU time says nothing, the time until it has finished.

    Args:
        group: of the pp axis.

    Attributes:
        steps: of each step, the spans, by this host's clock, and the seconds of each action.
        zero: when all ranks began the last step, by the same clock.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self.device, self.group = device, group
        self.steps: list[tuple[list[ActionSpan], dict[Action, float]]] = []
        self.zero = 0.0

    def start(self) -> None:
        """A step begins, on all ranks together. A collective."""
        dist.barrier(self.group, device_ids=None if self.device.index is None else [self.device.index])
        self.zero = perf_counter()
        self.steps.append(([], {}))

    def note(self, action: Action, work: Callable[[], Any]) -> Any:
        """Do the work, and note it."""
        spans, seconds = self.steps[-1]
        begin, cpu = perf_counter(), thread_time()
        result = work()
        synchronize(self.device)
        end = perf_counter()
        took = thread_time() - cpu if self.device.type == "cpu" else end - begin
        first = spans.pop().begin if spans and spans[-1].action == action else begin
        spans.append(ActionSpan(action, first, end))
        seconds[action] = seconds.get(action, 0.0) + took
        return result

    def go_on(self, work: Callable[[], Any]) -> Any:
        """Do work that belongs to the last action: the loss, after a forward."""
        spans, _ = self.steps[-1]
        return self.note(spans[-1].action, work) if spans else work()  # else PyTorch is inferring shapes
