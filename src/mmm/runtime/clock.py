"""Seconds of a step and of its parts. The device is waited for at each mark, so that a part is charged its own work."""

from __future__ import annotations

from time import perf_counter, time

import torch

from mmm.runtime.device import synchronize

PARTS = ("dtd", "dtf", "dtb", "dto")
PIPELINE_PARTS = ("dtd", "dtf", "dtb", "dtw", "dto")  # with a pipeline, a rank also waits


class StepClock:
    """Stopwatch of one step.

    ``start()``, then ``lap("dtd")``, ``lap("dtf")`` … at the end of each part. A part may be marked many times in a
    step (micro-batches): its seconds add up. The parts add up to ``dt`` because ``dt`` is their sum.

    Attributes:
        first_start, first_end: of the very first step, in seconds since 1970; None before. The last part ends a step.
    """

    def __init__(self, device: torch.device, parts: tuple[str, ...] = PARTS) -> None:
        self.device = device
        self.parts = parts
        self._mark = 0.0
        self._seconds: dict[str, float] = {}
        self.first_start: float | None = None
        self.first_end: float | None = None

    def start(self) -> None:
        synchronize(self.device)
        self._seconds = dict.fromkeys(self.parts, 0.0)
        self._mark = perf_counter()
        if self.first_start is None:
            self.first_start = time()

    def lap(self, part: str) -> None:
        """Charge the time since the last mark to `part`."""
        synchronize(self.device)
        now = perf_counter()
        self._seconds[part] += now - self._mark
        self._mark = now
        if self.first_end is None and part == self.parts[-1]:
            self.first_end = time()

    def seconds(self) -> dict[str, float]:
        """``dt`` and each part, in seconds, of the step since ``start()``."""
        return {"dt": sum(self._seconds.values()), **self._seconds}
