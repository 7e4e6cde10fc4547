"""The training loop that all trainers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.parallel import clip_grad_norm, local_value, sync_gradients
from mmm.runtime.seed import seed_step
from mmm.trainer.progress import epochs_bar
from mmm.trainer.run import Run
from mmm.trainer.schedule import Schedule, constant
from mmm.trainer.tasks import Task

B = TypeVar("B")
Callback = Callable[[Run, nn.Module, int], None]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How to train.

    Attributes:
        steps: optimizer steps in all.
        accumulate: micro-batches of a step; gradients are reduced over ranks at the last one only.
        max_norm: the gradient's norm is cut down to this; 0 leaves it.
        schedule: factor of the learning rate at a step.
        eval_every: steps between two evaluations; 0 for the end alone. by_epoch: one row, and one evaluation, an epoch
            (and at the end), instead of a row a step.
        callbacks: called as ``callback(run, model, step)`` after each row.
    """

    steps: int
    accumulate: int = 1
    max_norm: float = 0.0
    schedule: Schedule = constant
    eval_every: int = 0
    by_epoch: bool = False
    callbacks: tuple[Callback, ...] = field(default=())


def fit(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task[B], how: Fit) -> dict[str, float]:
    """Train `model`, in place.

    Returns:
        The last evaluation, the same on every rank.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(run.device.type, enabled=run.precision.name == "fp16")
    coordinate = run.layout.dp_coordinate(run.rank.rank)
    clock, share, since, judged = run.clock, 0.0, 0, {}
    batches = _all_epochs(task)
    clock.start()
    steps = range(how.steps)
    for step in epochs_bar(steps, task.steps_per_epoch, run.rank) if how.by_epoch else steps:
        model.train()
        seed_step(run.options.seed, step, coordinate)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * how.schedule(step)
        for i, micro in enumerate(task.micro_batches(next(batches), how.accumulate)):
            clock.lap("dtd")
            sync_gradients(model, i == how.accumulate - 1)
            with loss_parallel():
                loss = task.loss(model, micro)
                share += local_value(loss)
                clock.lap("dtf")
                scaler.scale(loss).backward()
            clock.lap("dtb")
        if how.max_norm:
            scaler.unscale_(optimizer)
            clip_grad_norm(model.parameters(), how.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        clock.lap("dto")

        since, last = since + 1, step == how.steps - 1
        end_of_epoch = (step + 1) % task.steps_per_epoch == 0
        judge = last or (end_of_epoch if how.by_epoch else how.eval_every > 0 and (step + 1) % how.eval_every == 0)
        if how.by_epoch and not judge:
            continue
        more = judged = evaluate(model, task) if judge else {}
        at = {"epoch": step // task.steps_per_epoch + 1} if how.by_epoch else {"iter": step}
        name = {"train_loss" if how.by_epoch else "loss": share / since}
        due = judge or step % run.options.log_every == 0
        size = since * task.global_batch, since * task.tokens
        run.row(at, name, samples=size[0], tokens=size[1], more=more, due=due, depth=2)
        for callback in how.callbacks:
            callback(run, model, step)
        share, since = 0.0, 0
        clock.start()
    return judged


def _all_epochs(task: Task[B]) -> Iterator[B]:
    epoch = 0
    while True:
        yield from task.batches(epoch)
        epoch += 1


@torch.no_grad()
def evaluate(model: nn.Module, task: Task[B]) -> dict[str, float]:
    """The task's judgement of the model, dropout off."""
    model.eval()
    return task.evaluate(model)
