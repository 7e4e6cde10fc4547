"""What watches a run of this process: a run asks here when it starts, and a program knows nothing of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mmm.layout import Layout
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
            resolved: a `mmm.trainer.config.spec.RunSpec`.
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
