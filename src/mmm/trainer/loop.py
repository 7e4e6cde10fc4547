"""The training loop that all trainers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mmm.parallel.clip import local_norms
from mmm.parallel.ep.balance import BALANCE_RATE
from mmm.parallel.grad_scaler import GradScaler, not_finite
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.seed import seed_step
from mmm.trainer.checkpoints import Checkpoints
from mmm.trainer.optimizer import learning_rate
from mmm.trainer.profile_options import profile_of
from mmm.trainer.progress import StepsBar, epochs_bar
from mmm.trainer.run.core import Run
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
        balance_rate: how far a step moves the biases of experts (`mmm.parallel.ep.expert_parallel.balance_experts`).
        skip: a step with a loss or gradient that is not finite changes nothing; else it ends the run.
    """

    steps: int
    max_norm: float = 0.0
    schedule: Schedule = constant
    eval_every: int = 0
    by_epoch: bool = False
    balance_rate: float = BALANCE_RATE
    skip: bool = False


def fit(run: Run, model: ParallelModel, optimizer: torch.optim.Optimizer, task: Task, options: Fit) -> dict[str, float]:
    """Train `model`, in place, on whatever layout it is.

    Returns:
        The last evaluation, the same on every rank.
    """
    with StepsBar(run.rank) as bar:
        return _fit(run, model, optimizer, task, options, bar)


def _fit(
    run: Run, model: ParallelModel, optimizer: torch.optim.Optimizer, task: Task, options: Fit, bar: StepsBar
) -> dict[str, float]:
    rates = [group["lr"] for group in optimizer.param_groups]
    scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
    # Ranks that share samples draw the same dropout; but stages of a pipeline are other layers, and draw their own.
    coordinate = run.layout.dp_coordinate(run.rank.rank) * run.layout.pp + model.coordinates["pp"]
    checkpoints = Checkpoints(run, model, optimizer, scaler, task.origins)
    clock, evaluated = run.clock, dict[str, float]()
    named = list(model.named_parameters())
    counted: float | Tensor  # steps in it
    local_loss: Tensor | None  # on the device
    first, since, counted, local_loss = checkpoints.load()
    checkpoints.compare_rates(lambda step: max(rates) * options.schedule(step))
    batches, profile = task.all_batches(first), profile_of(run, model, first, options.steps)
    profile(first)
    clock.start()
    steps = range(first, options.steps)
    for step in epochs_bar(steps, task.steps_per_epoch, run.rank) if options.by_epoch else bar.over(steps):
        model.train()
        clock.step = step
        seed_step(run.options.seed, step, coordinate)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * options.schedule(step)
        batch = next(batches)
        clock.lap("dtd")
        # Laps dtf, dtb and, with pp, dtw.
        count = None if batch.has_padding else batch.count
        split = {} if batch.document_starts is None else {"document_starts": batch.document_starts}
        if model.draws and batch.sample_keys is not None:
            split["sample_keys"] = batch.sample_keys
        loss = model.step(batch.inputs, batch.targets, count, scaler, **split)
        scaler.unscale_(optimizer)
        at = {"epoch": step // task.steps_per_epoch + 1} if options.by_epoch else {"iter": step}
        norms, skip = None, None
        if options.skip or not scaler.is_enabled():  # else an overflow is the scaler's affair
            norms, skip = _look(run, {**at, "iter": step}, loss, named, options.skip)
        grad_norm = model.clip(options.max_norm, norms) if options.max_norm else None
        if skip is None:
            scaler.step(optimizer)
        else:
            scaler.step_unless(skip, optimizer)
        scaler.update()
        optimizer.zero_grad()
        stop = checkpoints.stop_asked()
        since, last = since + 1, step == options.steps - 1
        if skip is not None and options.by_epoch:  # the mean is of the other steps
            loss, counted = loss.where(skip == 0, 0), counted + (1 - skip)
        else:
            counted = counted + 1
        local_loss = loss if local_loss is None else local_loss + loss
        end_of_epoch = (step + 1) % task.steps_per_epoch == 0
        evaluate_now = last or (
            end_of_epoch if options.by_epoch else options.eval_every > 0 and (step + 1) % options.eval_every == 0
        )
        savers = checkpoints.due(step, last or stop)  # after a row, which finds out whether the loss is a number
        due = evaluate_now or (not options.by_epoch and (bool(savers) or step % run.options.log_every == 0))
        imbalance = model.balance_experts(scaler.unless_skipped(options.balance_rate), due)
        clock.lap("dto")

        row = evaluate_now or not options.by_epoch
        if row:
            if due:
                model.check_targets(step)
            more: dict[str, Any] = {"lr": learning_rate(optimizer)}
            if imbalance is not None:
                more["imbalance"] = imbalance
            if grad_norm is not None and not options.by_epoch:
                more["grad_norm"] = grad_norm
            if evaluate_now:
                model.train(False)
                evaluated = task.evaluate(model)
                more |= evaluated
            name = {"train_loss" if options.by_epoch else "loss": local_loss / counted}
            size = since * task.global_batch_size, since * task.tokens
            logged = run.row(at, name, samples=size[0], tokens=size[1], more=more, due=due, depth=3)
            if logged is not None and logged.numbers:  # on rank 0
                bar.row(logged.loss, logged.numbers.get("tps", logged.numbers["sps"]))
            local_loss, since, counted = None, 0, 0
        if savers:
            checkpoints.save(savers, step + 1, since, counted, local_loss)
        checkpoints.poll()
        if stop and not last:
            checkpoints.stop(step + 1)
        profile(step + 1)
        if row:
            clock.start()
        elif savers:
            clock.lap("dto")
    checkpoints.wait()
    if first == options.steps:  # the run was interrupted after its last step
        run.note("no step is left to make; the model is evaluated once more")
        model.train(False)
        clock.step = first - 1
        evaluated = task.evaluate(model)
    return evaluated


def _look(
    run: Run, at: dict[str, int], loss: Tensor, named: list[tuple[str, Parameter]], skips: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Keep on the device whether the loss and the gradients are finite, for the next row.

    Returns:
        `local_norms` of the gradients; and where steps are to be skipped `not_finite`, a collective.
    """
    gradients = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
    norms = local_norms([gradient for _, gradient in gradients])
    together = torch.stack(norms) if norms else loss.new_zeros(1)
    skip = not_finite(loss, together) if skips else None
    run.losses.add_step(at, loss, together, [name for name, _ in gradients], skip)
    return norms, skip
