"""The training loop that all trainers share: a step, a row, an evaluation, a save, on whatever layout the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmm.data import Batch
from mmm.optim.adamw import learning_rate
from mmm.optim.grad_scaler import GradScaler, not_finite
from mmm.parallel.clip import local_norms
from mmm.parallel.ep.balance import BALANCE_RATE
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.seed import seed_step
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.run import EvaluationOptions
from mmm.trainer.config.training import TrainerCheckpoint
from mmm.trainer.loop.checkpoints import Checkpoints, RowSoFar
from mmm.trainer.loop.fingerprints import Fingerprints
from mmm.trainer.loop.schedule import Schedule, constant, optimizer_text
from mmm.trainer.loop.tasks import Task
from mmm.trainer.run.core import Run


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How to train.

    Attributes:
        steps: optimizer steps in all.
        max_norm: the gradient's norm is clipped to this; 0 leaves it.
        schedule: factor of the learning rate at a step.
        evaluation: when to evaluate.
        by_epoch: one row, and one evaluation, an epoch (and at the end), instead of a row a step.
        balance_rate: how far a step moves the biases of experts (`mmm.parallel.ep.balance.balance_experts`).
        skip: a step with a loss or gradient that is not finite changes nothing; else it ends the run.
        checkpoint: what to save, and when.
        profile: which steps in detail.
    """

    steps: int
    max_norm: float = 0.0
    schedule: Schedule = constant
    evaluation: EvaluationOptions = EvaluationOptions()
    by_epoch: bool = False
    balance_rate: float = BALANCE_RATE
    skip: bool = False
    checkpoint: TrainerCheckpoint = TrainerCheckpoint()
    profile: ProfileOptions = ProfileOptions()


@dataclass(frozen=True)
class RowAStep:
    """When rows are due: after each ``--log_every`` steps, an evaluation or a save; a row has a step's loss."""

    steps: int
    log_every: int
    evaluation: EvaluationOptions
    loss = "loss"

    def at(self, step: int) -> dict[str, int]:
        """What a row says of where the run is."""
        return {"iter": step}

    def ends_row(self, step: int) -> bool:
        """Whether the row under way is complete after this step."""
        return True

    def evaluates(self, step: int) -> bool:
        return self.evaluation.is_due(step, self.steps)

    def is_due(self, step: int, saves: bool) -> bool:
        """Whether the host waits for this step. A save follows a row, which finds out whether the loss is a number."""
        return saves or self.evaluates(step) or step % self.log_every == 0


@dataclass(frozen=True)
class RowAnEpoch:
    """When rows are due: after each epoch, with an evaluation, and at the end. As `RowAStep`."""

    steps: int
    steps_per_epoch: int
    loss = "train_loss"

    def at(self, step: int) -> dict[str, int]:
        return {"epoch": step // self.steps_per_epoch + 1}

    def ends_row(self, step: int) -> bool:
        return step == self.steps - 1 or (step + 1) % self.steps_per_epoch == 0

    def evaluates(self, step: int) -> bool:
        return self.ends_row(step)

    def is_due(self, step: int, saves: bool) -> bool:
        return self.ends_row(step)


class StepResult(NamedTuple):
    """What a step has left, on the device.

    Attributes:
        loss: this rank's local loss.
        grad_norm: of the full gradient before it was clipped; None where it is not clipped.
        skip: 1.0 where the step was skipped, else 0.0; None where steps are not skipped.
    """

    loss: Tensor
    grad_norm: Tensor | None
    skip: Tensor | None


def fit(
    run: Run, model: ParallelModel, optimizer: torch.optim.Optimizer, task: Task, options: FitConfig
) -> dict[str, float]:
    """Train `model`, in place, on whatever layout it is.

    Returns:
        The last evaluation, the same on every rank.
    """
    run.log.info("optimizer: %s", optimizer_text(optimizer))
    return _Loop(run, model, optimizer, task, options).run_all()


class _Loop:
    def __init__(
        self, run: Run, model: ParallelModel, optimizer: torch.optim.Optimizer, task: Task, options: FitConfig
    ) -> None:
        self.run, self.model, self.optimizer, self.task, self.options = run, model, optimizer, task, options
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        # Ranks that share samples draw the same dropout; but stages of a pipeline are other layers, and draw their own.
        self.coordinate = run.layout.dp_coordinate(run.rank.rank) * run.layout.pp + model.coordinates["pp"]
        self.checkpoints = Checkpoints(run, model, optimizer, self.scaler, task.metadata, options.checkpoint)
        self.named = list(model.named_parameters())
        self.rows: RowAStep | RowAnEpoch
        if options.by_epoch:
            self.rows = RowAnEpoch(options.steps, task.steps_per_epoch)
        else:
            self.rows = RowAStep(options.steps, run.log_every, options.evaluation)
        self.evaluated: dict[str, float] = {}
        self.fingerprints: Fingerprints | None = None

    def run_all(self) -> dict[str, float]:
        """Every step that is left."""
        run, options, checkpoints = self.run, self.options, self.checkpoints
        first, so_far = checkpoints.load()
        if options.profile.fingerprints is not None and not run.dry:
            self.fingerprints = Fingerprints(run, self.model, options.profile.fingerprints, first)
        batches, profile = (
            self.task.all_batches(first),
            _profile_of(run, options.profile, first, options.steps),
        )
        profile(first)
        self.model.train()
        run.clock.start()
        for step in range(first, options.steps):
            result = self.train_step(step, batches)
            stop, last = checkpoints.stop_asked(), step == options.steps - 1
            so_far = so_far.with_step(result.loss, result.skip if options.by_epoch else None)
            saves = checkpoints.due(step, last or stop)
            due = self.rows.is_due(step, saves)
            imbalance = self.balance_experts(result.skip, due)
            run.clock.lap("dto")
            ends_row = self.rows.ends_row(step)
            if ends_row:
                self.write_row(step, so_far, result, imbalance, due)
                so_far = RowSoFar()
            if saves:
                checkpoints.save(step + 1, so_far)
            checkpoints.poll()
            if stop and not last:
                checkpoints.stop(step + 1)
            profile(step + 1)
            if ends_row:
                run.clock.start()
            elif saves:
                run.clock.lap("dto")
        checkpoints.wait()
        if first == options.steps:  # the run was interrupted after its last step
            run.note("no step is left to make; the model is evaluated once more")
            run.clock.step = first - 1
            self.evaluate()
        return self.evaluated

    def train_step(self, step: int, batches: Iterator[Batch]) -> StepResult:
        """One optimizer step. The laps dtd, dtf, dtb and, with pp, dtw end in it."""
        run, model, scaler, options = self.run, self.model, self.scaler, self.options
        run.clock.step = step
        seed_step(run.seed, step, self.coordinate)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * options.schedule(step)
        batch = next(batches)
        run.clock.lap("dtd")
        of_samples: dict[str, Tensor] = {}
        if batch.document_starts is not None:
            of_samples["document_starts"] = batch.document_starts
        if model.has_dropout and batch.sample_keys is not None:
            of_samples["sample_keys"] = batch.sample_keys
        count = None if batch.has_padding else batch.count
        loss = model.step(batch.inputs, batch.targets, count, scaler, **of_samples)
        scaler.unscale_(self.optimizer)
        if self.fingerprints is not None:
            self.fingerprints.gradients(step, loss, batch.inputs, batch.targets)
        norms, skip = None, None
        if options.skip or not scaler.is_enabled():  # else an overflow is the scaler's affair
            norms, skip = self._look_for_not_finite(step, loss)
        grad_norm = model.clip(options.max_norm, norms) if options.max_norm else None
        if skip is None or not skip.item():
            scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        if self.fingerprints is not None:
            self.fingerprints.weights(step)
        return StepResult(loss, grad_norm, skip)

    def balance_experts(self, skip: Tensor | None, due: bool) -> Tensor | None:
        """Move the experts' biases, but after a step that was skipped; the imbalance, where it is due. A collective."""
        rate: float | Tensor = self.options.balance_rate
        if skip is None:
            skip = self.scaler.found_inf
        if skip is not None:
            rate = rate * (1 - skip)
        return self.model.balance_experts(rate, due)

    def _look_for_not_finite(self, step: int, loss: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Keep on the device whether the loss and the gradients are finite, for the next row.

        Returns:
            `local_norms` of the gradients; and where steps are to be skipped `not_finite`, a collective.
        """
        gradients = [(name, parameter.grad) for name, parameter in self.named if parameter.grad is not None]
        norms = local_norms([gradient for _, gradient in gradients])
        together = torch.stack(norms) if norms else loss.new_zeros(1)
        skip = not_finite(loss, together) if self.options.skip else None
        at = {**self.rows.at(step), "iter": step}
        self.run.losses.add_step(at, loss, together, [name for name, _ in gradients], skip)
        return norms, skip

    def write_row(self, step: int, so_far: RowSoFar, result: StepResult, imbalance: Tensor | None, due: bool) -> None:
        """The row that this step ends. A collective where it is due."""
        if due:
            self.model.check_targets(step)
        more: dict[str, Any] = {"lr": learning_rate(self.optimizer)}
        if imbalance is not None:
            more["imbalance"] = imbalance
        if result.grad_norm is not None and not self.options.by_epoch:
            more["grad_norm"] = result.grad_norm
        if self.rows.evaluates(step):
            more |= self.evaluate()
        self.run.row(
            self.rows.at(step),
            {self.rows.loss: so_far.mean()},
            samples=so_far.steps * self.task.global_batch_size,
            tokens=so_far.steps * self.task.tokens,
            more=more,
            due=due,
            depth=4,
        )

    def evaluate(self) -> dict[str, float]:
        self.model.train(False)
        self.evaluated = self.task.evaluate(self.model)
        self.model.train()
        return self.evaluated


def _profile_of(run: Run, options: ProfileOptions, first: int, end: int) -> Callable[[int], None]:
    """What is to be called with each step before it begins, and after the last; a collective.

    Args:
        first, end: of the steps that this process makes.
    """
    if options.profile is None or run.dry or first >= end:
        return lambda step: None
    from mmm.trainer.loop.profile import Profile  # a run with --profile only

    return Profile(run, options, first, end).at
