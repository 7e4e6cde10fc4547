"""What watches a run of this process: a run asks here when it starts, and a program knows nothing of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from mmm.layout import Layout
from mmm.runtime.clock import StepClock
from mmm.runtime.device import Precision


class WatchedRun(NamedTuple):
    """A run that starts.

    Attributes:
        group: its process group, for as long as the block lasts.
        clock: of its steps.
        layout: fitted to the number of ranks.
        precision: its data types.
        resolved: a `mmm.trainer.job.Job`.
    """

    group: AbstractContextManager[None]
    clock: StepClock
    layout: Layout
    precision: Precision
    resolved: Any


class Observer(ABC):
    """Watches the run that this process starts inside `observing`."""

    @abstractmethod
    def group(self, run: WatchedRun) -> AbstractContextManager[None]:
        """A run's process group, its own or one instead, for as long as the run is watched."""


_OBSERVERS: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def observed(run: WatchedRun) -> AbstractContextManager[None]:
    """A run's process group, under this process's observer if it has one."""
    for observer in _OBSERVERS:
        run = run._replace(group=observer.group(run))
    return run.group
