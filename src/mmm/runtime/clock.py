"""Measures the seconds of a step and of its parts, and how long a rank's host waits for other ranks.

Until the seconds are asked for, measuring does not make the host wait for the device. Every rank of a synchronous step
takes as long as the slowest, so a step's time does not tell which rank that is: what remains of it without the waiting
is the rank's own work.
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

# The parts of a step: data, forward, backward, optimizer. With a pipeline, a rank also waits (dtw).
PARTS = ("dtd", "dtf", "dtb", "dto")
PIPELINE_PARTS = ("dtd", "dtf", "dtb", "dtw", "dto")

# Name of dt less the seconds in which the rank waited for others.
OWN = "dt_own"

# The most laps whose events are kept before the older half is added up.
MOST_LAPS = 1024


def event_class(device: torch.device) -> Any:
    """Return PyTorch's Event class where the host runs ahead of the device, else None."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).Event
    return None


class StepClock:
    """A stopwatch of steps.

    Call ``start()``, then ``lap("dtd")``, ``lap("dtf")`` … at the end of each part. A part may have many laps in a step
    (micro-batches): its seconds add up. `read` returns the mean over the steps since it was last called; the parts add
    up to ``dt`` because ``dt`` is their sum.

    On CUDA and XPU a mark is an event in the device's queue, and a part is the time between the device's reaching two
    of them. The host continues meanwhile; it waits in `read`, and at both ends of the very first step. Elsewhere a mark
    is the host's time, taken once the device has finished.

    Attributes:
        device: the device whose work is measured.
        parts: names of the parts of a step; the last part ends it.
        step: number of the optimizer step under way, from 0; None before the first. Whoever makes the steps sets it.
        phase: ``start``; ``step N``; or ``after step N`` from a step's last lap to the next step, where evaluations
            are.
        first_start: when the very first step began, in seconds since 1970; None before.
        first_end: when the very first step ended, in seconds since 1970; None before.
        waited: function that returns the seconds so far in which the host waited for other ranks (`timed_waits`); NaN
            if unknown.
        paused: whether laps are ignored, so that no part is charged.
        optimizer_ends_backward: whether the optimizer's update ends the part ``dtb``.
    """

    paused = False
    optimizer_ends_backward = False

    def __init__(self, device: torch.device, parts: tuple[str, ...] = PARTS) -> None:
        self.device = device
        self.parts = parts
        self.phase = "start"
        self.first_start: float | None = None
        self.first_end: float | None = None
        self.waited: Callable[[], float] = lambda: math.nan
        self._event = event_class(device)
        self._step: int | None = None
        self._last: Any = None
        # Laps that are not added up yet: a part, and the marks at its two ends.
        self._laps: list[tuple[str, Any, Any]] = []
        # Since the last `read`: seconds of each part, steps that have begun, seconds of waiting.
        self._seconds = dict.fromkeys(parts, 0.0)
        self._steps = 0
        self._waits = 0.0
        # What `waited` returned at the last mark.
        self._waited = math.nan

    @property
    def step(self) -> int | None:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.phase = f"step {step}"

    def start(self) -> None:
        """Begin a step."""
        if self.first_start is None:
            synchronize(self.device)
            self.first_start = time()
            self.step = 0
        self._steps += 1
        self._waited = self.waited()
        self._last = self._mark()

    def lap(self, name: str) -> None:
        """Charge the time since the last mark to a part of the step.

        Args:
            name: name of the part, one of `parts`.
        """
        if self.paused:
            return
        now = self._mark()
        self._laps.append((name, self._last, now))
        self._last = now
        waited = self.waited()
        self._waits += waited - self._waited
        self._waited = waited
        ends_step = name == self.parts[-1]
        if ends_step:
            self.phase = f"after step {self._step}"
        if self._event is None:
            self._add_up(1)
        elif len(self._laps) > MOST_LAPS:
            # The older half of the events was reached long ago: the host does not wait for them.
            self._add_up(MOST_LAPS // 2)
        if self.first_end is None and ends_step:
            synchronize(self.device)
            self.first_end = time()

    def end_step(self) -> None:
        """Charge the rest of the step to its last part."""
        self.lap(self.parts[-1])

    def pause(self) -> None:
        """End the step, if one is under way. What follows is charged to no part, until `resume`."""
        # Between two loops no step has begun since the last row, and no row is to have that time.
        if self._steps:
            self.end_step()
        self.paused = True

    def resume(self) -> None:
        """Charge time again, from now on."""
        self.paused = False
        self._waited = self.waited()
        self._last = self._mark()

    def read(self) -> dict[str, float]:
        """Return the seconds of a step, as the mean over the steps since the last call. The host waits for the device.

        Returns:
            ``dt``, each part, and ``dt_own``, which is ``dt`` less what the host waited for other ranks (NaN if
            unknown).

        Raises:
            ConfigError: no step has begun since the last call.
        """
        if not self._steps:
            raise ConfigError("no step has begun since the last row: call clock.start() before each")
        self._add_up(len(self._laps))
        parts = {}
        for name, seconds in self._seconds.items():
            parts[name] = seconds / self._steps
        dt = sum(parts.values())
        own = dt - self._waits / self._steps
        self._seconds = dict.fromkeys(self.parts, 0.0)
        self._steps = 0
        self._waits = 0.0
        return {"dt": dt, **parts, OWN: own}

    @property
    def last_mark(self) -> object:
        """An object that is another one after each mark: who watches the clock sees whether it has moved."""
        return self._last

    def _mark(self) -> Any:
        """Mark this moment: by an event in the device's queue, or by the host's time."""
        if self._event is None:
            synchronize(self.device)
            return perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def _add_up(self, count: int) -> None:
        """Add the seconds of the first `count` laps to those of their parts."""
        laps = self._laps[:count]
        self._laps = self._laps[count:]
        if self._event is None:
            for name, begin, end in laps:
                self._seconds[name] += end - begin
            return
        if laps:
            # The device reaches events in their order: once it has reached the last one, all are known.
            last_end = laps[-1][2]
            last_end.synchronize()
        for name, begin, end in laps:
            # PyTorch counts milliseconds.
            self._seconds[name] += begin.elapsed_time(end) / 1000


@contextmanager
def timed_waits(clock: StepClock) -> Iterator[None]:
    """Inside, the clock knows how long this thread has waited for collectives, sends and receives.

    That is known only where the host itself waits, in the two functions of PyTorch's that are replaced here. On CUDA
    and XPU the device's queue waits, and `DistributedDataParallel` waits in C++: there the clock says NaN.
    """
    waited = 0.0
    thread = threading.get_ident()

    def timing(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            # Other threads wait while this one computes: their waiting does not lengthen the step.
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
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, change in changes:
            original = getattr(owner, name)
            setattr(owner, name, change(original))
        clock.waited = lambda: waited
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
