"""Records the calls to process groups, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmm.parallel.collective_bytes import Call
from mmm.traffic.count import Traffic


@dataclass(frozen=True)
class SentCall:
    """A call to a process group.

    Attributes:
        phase: the phase of the run in which it was made, as `StepClock.phase` says it.
        axis: the mesh axis that the group lies on.
        doing: ``forward``, ``backward`` or ``optimizer``, as `MemoryTracker.doing` says it.
    """

    phase: str
    axis: str
    call: Call
    doing: str = ""


class SentInOrder(Traffic):
    """Counts traffic, as `Traffic` does, and also keeps each call."""

    def __init__(self, phase: Callable[[], str], doing: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.phase = phase
        self.doing = doing
        self.calls: list[SentCall] = []

    def add(self, axis: str, call: Call) -> None:
        super().add(axis, call)
        self.calls.append(SentCall(self.phase(), axis, call, self.doing()))
