"""Learning-rate schedules: the factor of the base rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mmm.run.run import Run
from mmm.trainer.config import Optimizer

Schedule = Callable[[int], float]


def warmup_cosine(steps: int, warmup: int, least: float = 0.0) -> Schedule:
    """Up in a straight line over `warmup` steps, then half a cosine from 1 down to `least` at the last of `steps`.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        along = (step - warmup) / max(steps - 1 - warmup, 1)
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))

    return factor


def warmup_stable_decay(steps: int, warmup: int, decay: int, least: float = 0.0) -> Schedule:
    """Up in a straight line over `warmup` steps, then 1, and over the last `decay` of `steps` down in a straight line,
    to `least` after the last.

    Source: Hu et al., "MiniCPM", 2024.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return least + (1 - least) * min(1.0, (steps - step) / (decay + 1))

    return factor


def schedule_of(run: Run, steps: int, options: Optimizer) -> Schedule:
    """The schedule that the flags ask for. Its warm-up ends by the middle of a run; where it is shorter than asked for,
    a note says so."""
    most, warmup = steps // 2, options.warmup
    if warmup > most:
        run.note(f"warm-up: {most} instead of {warmup} steps, half of the {steps} of this run")
        warmup = most
    least = options.min_lr / options.lr
    if options.lr_schedule == "cosine":
        return warmup_cosine(steps, warmup, least)
    decay = max(steps // 5, 1) if options.decay is None else options.decay
    if decay > steps - warmup:
        run.note(f"decay: {steps - warmup} instead of {decay} steps, all that the warm-up leaves")
        decay = steps - warmup
    return warmup_stable_decay(steps, warmup, decay, least)


def step_decay(steps_per_epoch: int, gamma: float) -> Schedule:
    """`gamma` to the power of the epoch: ``torch.optim.lr_scheduler.StepLR(step_size=1 epoch, gamma)``."""
    return lambda step: gamma ** (step // steps_per_epoch)


class LearningRate:
    """Sets the learning rates of an optimizer: those that it was made with, times the factor of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Schedule) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.factor(step)


def optimizer_text(optimizer: torch.optim.Optimizer) -> str:
    """``AdamW, lr 0.003, betas (0.9, 0.95), weight decay 0.1 of 816,000 of 816,256 parameters``; in a pipeline, of
    this rank's stage."""
    groups = optimizer.param_groups
    sizes = [sum(parameter.numel() for parameter in group["params"]) for group in groups]
    rates = sorted({f"{group['lr']:g}" for group in groups}, key=float, reverse=True)
    words = [type(optimizer).__name__, f"lr {' and '.join(rates)}"]
    words += [f"{name} {groups[0][name]}" for name in ("betas", "momentum") if groups[0].get(name)]
    for decay in sorted({group["weight_decay"] for group in groups if group.get("weight_decay")}):
        decayed = sum(size for size, group in zip(sizes, groups, strict=True) if group.get("weight_decay") == decay)
        words.append(f"weight decay {decay:g} of {decayed:,} of {sum(sizes):,} parameters")
    return ", ".join(words)
