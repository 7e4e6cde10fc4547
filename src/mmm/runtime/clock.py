"""Measures the seconds of a step and of its parts, and how long a rank waits for other ranks.

Until the seconds are asked for, measuring does not make the host wait for the device. Every rank of a synchronous step
takes as long as the slowest, so a step's time does not tell which rank that is: what remains of it without the waiting
is the rank's own work. Which calls wait for other ranks, `mmm.runtime.waits` knows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, time
from typing import Any

import torch

from mmm.errors import ConfigError
from mmm.runtime.device import synchronize
from mmm.torch_private.autograd import in_backward

# The parts of a step: data, forward, backward, optimizer. With a pipeline, a rank also waits (dtw).
PARTS = ("dtd", "dtf", "dtb", "dto")
PIPELINE_PARTS = ("dtd", "dtf", "dtb", "dtw", "dto")

# Name of dt less the seconds in which the rank waited for others.
OWN = "dt_own"

# Name of the laps that are waiting for others. They lie inside the laps of the parts.
WAITS = "waits"

# The most laps whose events are kept before the older half is added up. The half is longer than the queue of kernels
# by which a host can be ahead of its device (about 1,000).
MOST_LAPS = 4096


def stream_module(device: torch.device) -> Any:
    """Return PyTorch's module of the device's streams and events where the host runs ahead of it, else None."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type)
    return None


def event_class(device: torch.device) -> Any:
    """Return PyTorch's Event class where the host runs ahead of the device, else None."""
    return getattr(stream_module(device), "Event", None)


class _ThisThread(threading.local):
    """What one thread is doing.

    Attributes:
        waits: whether it is inside `StepClock.waiting`.
    """

    waits = False


class StepClock:
    """A stopwatch of steps.

    Call ``start()``, then ``lap("dtd")``, ``lap("dtf")`` … at the end of each part. A part may have many laps in a step
    (micro-batches): its seconds add up. `read` returns the mean over the steps since it was last called; the parts add
    up to ``dt`` because ``dt`` is their sum.

    On CUDA and XPU a mark is an event in the queue of the compute stream, which is the current stream where a step
    starts. A part is the time between the device's reaching two marks. The host continues meanwhile; it waits in
    `read`, and at both ends of the very first step. Elsewhere a mark is the host's time, taken once the device has
    finished.

    Attributes:
        device: the device whose work is measured.
        parts: names of the parts of a step; the last part ends it.
        step: number of the optimizer step under way, from 0; None before the first. Whoever makes the steps sets it.
        phase: ``start``; ``step N``; or ``after step N`` from a step's last lap to the next step, where evaluations
            are.
        first_start: when the very first step began, in seconds since 1970; None before.
        first_end: when the very first step ended, in seconds since 1970; None before.
        knows_waits: whether all waiting for other ranks passes through `waiting`. If not, ``dt_own`` is NaN.
        paused: whether laps are ignored, so that no part is charged.
        optimizer_ends_backward: whether the optimizer's update ends the part ``dtb``.
    """

    knows_waits = False
    paused = False
    optimizer_ends_backward = False

    def __init__(self, device: torch.device, parts: tuple[str, ...] = PARTS) -> None:
        self.device = device
        self.parts = parts
        self.phase = "start"
        self.first_start: float | None = None
        self.first_end: float | None = None
        # None: the host's time is the device's.
        self._streams = stream_module(device)
        self._compute_stream: Any = None
        self._thread = threading.get_ident()
        self._this_thread = _ThisThread()
        self._step: int | None = None
        self._last: Any = None
        # Laps that are not added up yet: a part, and the marks at its two ends.
        self._laps: list[tuple[str, Any, Any]] = []
        # Waiting since the last lap: the marks at its two ends.
        self._waits: list[tuple[Any, Any]] = []
        # Since the last `read`: seconds of each part, and of the waiting; steps that have begun.
        self._seconds = dict.fromkeys((*parts, WAITS), 0.0)
        self._steps = 0

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
        self._begin()

    def lap(self, name: str) -> None:
        """Charge the time since the last mark to a part of the step.

        Args:
            name: name of the part, one of `parts`.
        """
        if self.paused:
            return
        now = self._mark()
        # In the order of their ends, as the device reaches them.
        for begin, end in self._waits:
            self._laps.append((WAITS, begin, end))
        self._waits.clear()
        self._laps.append((name, self._last, now))
        self._last = now
        ends_step = name == self.parts[-1]
        if ends_step:
            self.phase = f"after step {self._step}"
        if self._streams is None:
            self._add_up(len(self._laps))
        elif len(self._laps) > MOST_LAPS:
            # The older half of the events was reached long ago: the host does not wait for them.
            self._add_up(len(self._laps) // 2)
        if self.first_end is None and ends_step:
            synchronize(self.device)
            self.first_end = time()

    def model_lap(self, name: str) -> None:
        """`lap` for a model that times its own backward: the optimizer's update does not end it once more."""
        self.optimizer_ends_backward = False
        self.lap(name)

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
        self._begin()

    @contextmanager
    def waiting(self, stream: Any = None) -> Iterator[None]:
        """Inside, this rank waits for other ranks: in a collective, a send or a receive. That is not its own work.

        On CUDA and XPU it is a stream that waits, and the host only puts the wait in the stream's queue. An event
        before it and one after it are as far apart as the stream stands still. A wait inside a wait counts once. Not
        counted are waits of other streams than the compute stream, of other threads, and outside of a step.

        Args:
            stream: the stream that is made to wait. None: the current one.
        """
        if not self._counts(stream):
            yield
            return
        begin = self._mark()
        self._this_thread.waits = True
        try:
            yield
        finally:
            self._this_thread.waits = False
            self._waits.append((begin, self._mark()))

    def read(self) -> dict[str, float]:
        """Return the seconds of a step, as the mean over the steps since the last call. The host waits for the device.

        Returns:
            ``dt``, each part, and ``dt_own``, which is ``dt`` less what the rank waited for others (NaN if unknown).

        Raises:
            ConfigError: no step has begun since the last call.
        """
        if not self._steps:
            raise ConfigError("no step has begun since the last row: call clock.start() before each")
        self._add_up(len(self._laps))
        means = {}
        for name, seconds in self._seconds.items():
            means[name] = seconds / self._steps
        waits = means.pop(WAITS)
        dt = sum(means.values())
        own = dt - waits if self.knows_waits else math.nan
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._steps = 0
        return {"dt": dt, **means, OWN: own}

    @property
    def last_mark(self) -> object:
        """An object that is another one after each mark: who watches the clock sees whether it has moved."""
        return self._last

    def _begin(self) -> None:
        """Charge the time from now on to the next lap."""
        self._thread = threading.get_ident()
        if self._streams is not None:
            self._compute_stream = self._streams.current_stream()
        # What was waited for before belongs to no lap.
        self._waits.clear()
        self._last = self._mark()

    def _counts(self, stream: Any) -> bool:
        """Whether a wait that begins in this thread now makes the step longer."""
        if self._last is None or self.paused or self._this_thread.waits:
            return False
        # Other threads, such as one that saves a checkpoint, wait while this one computes. But PyTorch runs the
        # backward of an accelerator's tensors in a thread of its own.
        if threading.get_ident() != self._thread and not in_backward():
            return False
        if self._streams is None:
            return True
        if stream is None:
            stream = self._streams.current_stream()
        return bool(stream == self._compute_stream)

    def _mark(self) -> Any:
        """Mark this moment: by an event in the compute stream's queue, or by the host's time."""
        if self._streams is None:
            synchronize(self.device)
            return perf_counter()
        event = self._streams.Event(enable_timing=True)
        event.record(self._compute_stream)
        return event

    def _add_up(self, count: int) -> None:
        """Add the seconds of the first `count` laps to those of their parts."""
        laps = self._laps[:count]
        self._laps = self._laps[count:]
        if self._streams is None:
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
