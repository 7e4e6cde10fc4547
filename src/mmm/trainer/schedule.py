"""Learning-rate schedules: the factor of the base rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warmup_cosine(steps: int, warmup: int, floor: float = 0.0) -> Schedule:
    """Up in a straight line over `warmup` steps, then half a cosine from 1 down to `floor` at the last of `steps`.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        along = (step - warmup) / max(steps - 1 - warmup, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))

    return factor


def fitting_warmup(warmup: int, steps: int) -> tuple[int, str]:
    """A warm-up that ends by the middle of a run, and where it is shorter than asked for, a note of it."""
    most = steps // 2
    if warmup <= most:
        return warmup, ""
    return most, f"warm-up: {most} steps instead of {warmup}, half of the {steps} steps of this run"


def step_decay(steps_per_epoch: int, gamma: float) -> Schedule:
    """`gamma` to the power of the epoch: ``torch.optim.lr_scheduler.StepLR(step_size=1 epoch, gamma)``."""
    return lambda step: gamma ** (step // steps_per_epoch)


def constant(step: int) -> float:
    return 1.0
