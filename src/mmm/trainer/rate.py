"""Learning-rate schedules: the factor of the base rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from mmm.run.run import Run
from mmm.trainer.config import Optimizer

# From the index of a step, counted from 0, to the factor of the learning rate.
Schedule = Callable[[int], float]


def warmup_cosine(steps: int, warmup: int, least: float = 0.0) -> Schedule:
    """Rise in a straight line over `warmup` steps, then fall as half a cosine from 1 to `least` at the last step.

    Source: Loshchilov and Hutter, "SGDR", 2017.

    Args:
        steps: number of steps of the run.
        warmup: number of steps of the warm-up.
        least: factor at the last step.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        # 0 at the first step after the warm-up, 1 at the last step.
        last_step = steps - 1
        along = (step - warmup) / max(last_step - warmup, 1)
        cosine = math.cos(math.pi * min(along, 1.0))
        return least + (1 - least) * 0.5 * (1 + cosine)

    return factor


def warmup_stable_decay(steps: int, warmup: int, decay: int, least: float = 0.0) -> Schedule:
    """Rise in a straight line over `warmup` steps, stay at 1, and fall in a straight line over the last `decay` steps.

    The line reaches `least` one step after the last.

    Source: Hu et al., "MiniCPM", 2024.

    Args:
        steps: number of steps of the run.
        warmup: number of steps of the warm-up.
        decay: number of steps over which the rate falls.
        least: factor at the end of the line.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        line = (steps - step) / (decay + 1)
        return least + (1 - least) * min(1.0, line)

    return factor


def schedule_of(run: Run, steps: int, options: Optimizer) -> Schedule:
    """The schedule that the flags ask for.

    Warm-up and decay are shortened if the run is too short for them, and a note says so: the warm-up ends by the middle
    of the run.

    Args:
        run: takes the notes.
        steps: number of steps of the run.
        options: the group ``optimizer`` of the flags.
    """
    warmup = options.warmup
    longest_warmup = steps // 2
    if warmup > longest_warmup:
        taken = f"{longest_warmup} steps, half of the {steps} of this run"
        run.note(f"warm-up: {taken}: the {warmup} of --warmup do not fit")
        warmup = longest_warmup
    least = options.min_lr / options.lr
    if options.lr_schedule == "cosine":
        return warmup_cosine(steps, warmup, least)
    # A fifth of the run, if no flag says how long.
    decay = options.decay
    if decay is None:
        decay = max(steps // 5, 1)
    longest_decay = steps - warmup
    if decay > longest_decay:
        run.note(f"decay: {longest_decay} steps, all that the warm-up leaves: the {decay} of --decay do not fit")
        decay = longest_decay
    return warmup_stable_decay(steps, warmup, decay, least)


def step_decay(steps_per_epoch: int, gamma: float) -> Schedule:
    """`gamma` to the power of the epoch: ``torch.optim.lr_scheduler.StepLR(step_size=1 epoch, gamma)``."""
    return lambda step: gamma ** (step // steps_per_epoch)


class LearningRate:
    """Sets the learning rates of an optimizer: the rates that it was made with, times the factor of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Schedule) -> None:
        self.optimizer = optimizer
        self.factor = factor
        # Groups may differ in their rates.
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.factor(step)


def optimizer_text(optimizer: torch.optim.Optimizer) -> str:
    """``AdamW, lr 0.003, betas (0.9, 0.95), weight decay 0.1 of 816,000 of 816,256 parameters``.

    In a pipeline the parameters are those of this rank's stages.
    """
    groups = optimizer.param_groups

    def count(groups: list[dict[str, Any]]) -> int:
        return sum(parameter.numel() for group in groups for parameter in group["params"])

    rates = sorted({f"{group['lr']:g}" for group in groups}, key=float, reverse=True)
    texts = [type(optimizer).__name__, f"lr {' and '.join(rates)}"]
    for name in ("betas", "momentum"):
        value = groups[0].get(name)
        if value:
            texts.append(f"{name} {value}")
    decays = {group.get("weight_decay") or 0.0 for group in groups}
    for decay in sorted(decays - {0.0}):
        decayed = [group for group in groups if group.get("weight_decay") == decay]
        texts.append(f"weight decay {decay:g} of {count(decayed):,} of {count(groups):,} parameters")
    return ", ".join(texts)
