"""The training loop that all trainers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmm.parallel.expert.balance import BALANCE_RATE
from mmm.parallel.grad_scaler import GradScaler
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.seed import seed_step
from mmm.trainer.checkpoints import Checkpoints
from mmm.trainer.progress import epochs_bar
from mmm.trainer.run import Run
from mmm.trainer.schedule import Schedule, constant
from mmm.trainer.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How to train.

    Attributes:
        steps: optimizer steps in all.
        max_norm: the gradient's norm is clipped to this; 0 leaves it.
        schedule: factor of the learning rate at a step.
        eval_every: steps between two evaluations; 0 for the end alone. by_epoch: one row, and one evaluation, an epoch
            (and at the end), instead of a row a step.
        balance_rate: how far a step moves the biases of experts (`mmm.parallel.expert.apply.balance_experts`).
    """

    steps: int
    max_norm: float = 0.0
    schedule: Schedule = constant
    eval_every: int = 0
    by_epoch: bool = False
    balance_rate: float = BALANCE_RATE


def fit(run: Run, model: ParallelModel, optimizer: torch.optim.Optimizer, task: Task, options: Fit) -> dict[str, float]:
    """Train `model`, in place, on whatever layout it is.

    Returns:
        The last evaluation, the same on every rank.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
    # Ranks that share samples draw the same dropout; but stages of a pipeline are other layers, and draw their own.
    coordinate = run.layout.dp_coordinate(run.rank.rank) * run.layout.pp + model.coordinates["pp"]
    checkpoints = Checkpoints(run, model, optimizer, scaler)
    clock, evaluated = run.clock, dict[str, float]()
    local_loss: Tensor | None  # on the device
    first, since, local_loss = checkpoints.load()
    batches = task.all_batches(first)
    clock.start()
    steps = range(first, options.steps)
    for step in epochs_bar(steps, task.steps_per_epoch, run.rank) if options.by_epoch else steps:
        model.train()
        seed_step(run.options.seed, step, coordinate)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * options.schedule(step)
        batch = next(batches)
        clock.lap("dtd")
        # Laps dtf, dtb and, with pp, dtw.
        loss = model.step(batch.inputs, batch.targets, batch.count, scaler)
        local_loss = loss if local_loss is None else local_loss + loss
        scaler.unscale_(optimizer)
        if options.max_norm:
            model.clip(options.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stop = checkpoints.stop_asked()
        since, last = since + 1, step == options.steps - 1
        end_of_epoch = (step + 1) % task.steps_per_epoch == 0
        evaluate_now = last or (
            end_of_epoch if options.by_epoch else options.eval_every > 0 and (step + 1) % options.eval_every == 0
        )
        save = checkpoints.due(step, last or stop)  # after a row, which finds out whether the loss is a number
        due = evaluate_now or (not options.by_epoch and (save or step % run.options.log_every == 0))
        imbalance = model.balance_experts(scaler.unless_skipped(options.balance_rate), due)
        clock.lap("dto")

        row = evaluate_now or not options.by_epoch
        if row:
            more: dict[str, Any] = {} if imbalance is None else {"imbalance": imbalance}
            if evaluate_now:
                model.train(False)
                evaluated = task.evaluate(model)
                more |= evaluated
            at = {"epoch": step // task.steps_per_epoch + 1} if options.by_epoch else {"iter": step}
            name = {"train_loss" if options.by_epoch else "loss": local_loss / since}
            size = since * task.global_batch_size, since * task.tokens
            run.row(at, name, samples=size[0], tokens=size[1], more=more, due=due, depth=2)
            local_loss, since = None, 0
        if save:
            checkpoints.save(step + 1, since, local_loss)
        checkpoints.poll()
        if stop and not last:
            checkpoints.stop(step + 1)
        if row:
            clock.start()
        elif save:
            clock.lap("dto")
    checkpoints.wait()
    return evaluated
