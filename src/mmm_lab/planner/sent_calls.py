"""Calls to process groups, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmm.parallel.collective_bytes import Call
from mmm.traffic.count import Traffic


@dataclass(frozen=True)
class SentCall:
    """A call to a process group.

    Attributes:
        phase: when, of `StepClock.phase`. axis: of the mesh, in which the group lies.
        doing: ``forward``, ``backward`` or ``optimizer``, of `MemoryTracker.doing`; empty where nobody asks.
    """

    phase: str
    axis: str
    call: Call
    doing: str = ""


class SentInOrder(Traffic):
    """`Traffic` that also keeps each call."""

    def __init__(self, phase: Callable[[], str], doing: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.phase, self.doing, self.calls = phase, doing, list[SentCall]()

    def add(self, axis: str, call: Call) -> None:
        super().add(axis, call)
        self.calls.append(SentCall(self.phase(), axis, call, self.doing()))
