"""What watches a run of this process: `mmm.trainer.run.start_run` asks here, and a program knows nothing of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from mmm.analysis.collective_bytes import Call
from mmm.analysis.traffic import Traffic
from mmm.parallel.mesh import Layout
from mmm.runtime.clock import StepClock
from mmm.runtime.device import Precision


class Observer(ABC):
    """Watches the run that this process starts inside `observing`."""

    @abstractmethod
    def group(
        self, group: AbstractContextManager[None], clock: StepClock, layout: Layout, precision: Precision, resolved: Any
    ) -> AbstractContextManager[None]:
        """A run's process group, `group` or one instead, for as long as the run is watched.

        Args:
            resolved: a `mmm.trainer.resolve.Resolved`; of a program that has no model, its layout.
        """


_OBSERVERS: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def observed(
    group: AbstractContextManager[None], clock: StepClock, layout: Layout, precision: Precision, resolved: Any
) -> AbstractContextManager[None]:
    """A run's process group, under this process's observer if it has one."""
    for observer in _OBSERVERS:
        group = observer.group(group, clock, layout, precision, resolved)
    return group


@dataclass(frozen=True)
class SentCall:
    """A call to a process group. phase: when, of `StepClock.phase`; axis: of the mesh, in which the group lies."""

    phase: str
    axis: str
    call: Call


class SentInOrder(Traffic):
    """`Traffic` that also keeps each call."""

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self.phase, self.calls = phase, list[SentCall]()

    def add(self, axis: str, call: Call, on_gloo: bool) -> None:
        super().add(axis, call, on_gloo)
        self.calls.append(SentCall(self.phase(), axis, call))
