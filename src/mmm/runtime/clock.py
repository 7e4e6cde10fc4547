"""Seconds of a step and of its parts, without making the host wait for the device until they are asked for; and how
long a rank's host waits for other ranks.

Every rank of a synchronous step takes as long as the slowest, so its time does not tell which that is: what is left of
it without the waiting is the rank's own work.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, time
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from mmm.errors import ConfigError
from mmm.runtime.device import synchronize
from mmm.torch_private.groups import functional_collectives

PARTS = ("dtd", "dtf", "dtb", "dto")
PIPELINE_PARTS = ("dtd", "dtf", "dtb", "dtw", "dto")  # with a pipeline, a rank also waits
OWN = "dt_own"  # dt less what the rank waited in it for others
MOST_LAPS = 1024  # whose events are kept


def event_class(device: torch.device) -> Any:
    """PyTorch's Event, where the host runs ahead of the device; else None."""
    return getattr(torch, device.type).Event if device.type in ("cuda", "xpu") else None


class StepClock:
    """Stopwatch of steps.

    ``start()``, then ``lap("dtd")``, ``lap("dtf")`` … at the end of each part. A part may be marked many times in a
    step (micro-batches): its seconds add up. `read` is the mean of the steps since it was last called; the parts add up
    to ``dt`` because ``dt`` is their sum.

    On CUDA and XPU a mark is an event in the device's queue, and a part the time between the device's reaching two of
    them. The host goes on; it waits in `read`, and at both ends of the very first step. Elsewhere a mark is the
    host's time, once the device has finished.

    Attributes:
        step: the optimizer step that is under way, from 0; None before the first. Whoever makes the steps counts them.
        phase: ``start``, ``step N``, or from its last lap to the next step ``after step N``, where evaluations are.
        first_start, first_end: of the very first step, in seconds since 1970; None before. The last part ends a step.
        waited: the seconds so far in which the host waited for other ranks (`timed_waits`); NaN: not known.
        paused: no part is charged.
        optimizer_ends_backward: whether the optimizer's update ends the part ``dtb``.
    """

    paused = False
    optimizer_ends_backward = False

    def __init__(self, device: torch.device, parts: tuple[str, ...] = PARTS) -> None:
        self.device = device
        self.parts = parts
        self._event = event_class(device)
        self._last: Any = None  # mark
        self._laps: list[tuple[str, Any, Any]] = []  # part and the marks around it: those not yet added up
        self._seconds = dict.fromkeys(parts, 0.0)  # since `read`
        self._steps = 0  # begun since `read`
        self._step: int | None = None
        self.phase = "start"
        self.first_start: float | None = None
        self.first_end: float | None = None
        self.waited: Callable[[], float] = lambda: math.nan
        self._waits, self._waited = 0.0, math.nan  # since `read`; `waited` at the last mark

    @property
    def step(self) -> int | None:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self.phase = step, f"step {step}"

    def start(self) -> None:
        if self.first_start is None:
            synchronize(self.device)
            self.first_start, self.step = time(), 0
        self._steps += 1
        self._waited = self.waited()
        self._last = self._mark()

    def lap(self, part: str) -> None:
        """Charge the time since the last mark to `part`."""
        if self.paused:
            return
        now = self._mark()
        self._laps.append((part, self._last, now))
        self._last = now
        waited = self.waited()
        self._waits, self._waited = self._waits + (waited - self._waited), waited
        if part == self.parts[-1]:
            self.phase = f"after step {self._step}"
        if self._event is None:
            self._add_up(1)
        elif len(self._laps) > MOST_LAPS:
            self._add_up(MOST_LAPS // 2)  # long over: the host does not wait
        if self.first_end is None and part == self.parts[-1]:
            synchronize(self.device)
            self.first_end = time()

    def end_step(self) -> None:
        """Charge the rest of the step to its last part."""
        self.lap(self.parts[-1])

    def pause(self) -> None:
        """End the step, if one is under way. What follows is charged to no part, until `go_on`."""
        if self._steps:  # else it is between two loops: no row is to have that time
            self.end_step()
        self.paused = True

    def go_on(self) -> None:
        """Charge time again, from now on."""
        self.paused = False
        self._waited = self.waited()
        self._last = self._mark()

    def read(self) -> dict[str, float]:
        """Seconds of a step: ``dt``, each part, and ``dt_own``, which is ``dt`` less what the host waited for other
        ranks (NaN: not known). Each is the mean of the steps since the last call. The host waits for the last mark."""
        if not self._steps:
            raise ConfigError("no step has begun since the last row: call clock.start() before each")
        self._add_up(len(self._laps))
        parts = {part: seconds / self._steps for part, seconds in self._seconds.items()}
        dt = sum(parts.values())
        read = {"dt": dt, **parts, OWN: dt - self._waits / self._steps}
        self._seconds, self._steps, self._waits = dict.fromkeys(self.parts, 0.0), 0, 0.0
        return read

    @property
    def last_mark(self) -> object:
        """Another object after each mark."""
        return self._last

    def _mark(self) -> Any:
        if self._event is None:
            synchronize(self.device)
            return perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def _add_up(self, count: int) -> None:
        """The first `count` of the laps."""
        laps, self._laps = self._laps[:count], self._laps[count:]
        if laps and self._event is not None:
            laps[-1][2].synchronize()
        for part, begin, end in laps:
            self._seconds[part] += end - begin if self._event is None else begin.elapsed_time(end) / 1000


@contextmanager
def timed_waits(clock: StepClock) -> Iterator[None]:
    """Inside, the clock knows how long this thread has waited for collectives, sends and receives.

    Only where the host itself waits, by these two functions of PyTorch's: not on CUDA and XPU, whose queues wait, and
    not with `DistributedDataParallel`, which waits in C++. There the clock says NaN.
    """
    waited, thread = 0.0, threading.get_ident()

    def timing(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            if threading.get_ident() != thread:
                return wait(*args, **kwargs)
            began = perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                waited += perf_counter() - began

        return timed

    def untimed(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def marking(*args: Any, **kwargs: Any) -> None:
            nonlocal waited
            waited = math.nan
            init(*args, **kwargs)

        return marking

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (Work, "wait", timing),
        (functional_collectives(), "wait_tensor", timing),
        (DistributedDataParallel, "__init__", untimed),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, change in changes:
            setattr(owner, name, change(getattr(owner, name)))
        clock.waited = lambda: waited
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
