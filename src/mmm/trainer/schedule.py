"""Learning-rate schedules: the factor of the base rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from mmm.trainer.run import Run

Schedule = Callable[[int], float]


def warmup_cosine(steps: int, warmup: int) -> Schedule:
    """Up in a straight line over `warmup` steps, then half a cosine from 1 down to 0 at the last of `steps`.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        along = (step - warmup) / max(steps - 1 - warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))

    return factor


def fitting_warmup_cosine(run: Run, steps: int, warmup: int) -> Schedule:
    """`warmup_cosine` whose warm-up ends by the middle of a run; where it is shorter than asked for, a note says so."""
    most = steps // 2
    if warmup > most:
        run.note(f"warm-up: {most} steps instead of {warmup}, half of the {steps} steps of this run")
    return warmup_cosine(steps, min(warmup, most))


def step_decay(steps_per_epoch: int, gamma: float) -> Schedule:
    """`gamma` to the power of the epoch: ``torch.optim.lr_scheduler.StepLR(step_size=1 epoch, gamma)``."""
    return lambda step: gamma ** (step // steps_per_epoch)


def constant(step: int) -> float:
    return 1.0
