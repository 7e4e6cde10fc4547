"""Around the steps of a loop: what a program with a model, data and a loop of its own takes from the package
(docs/your-script.md), and on it the steps of the examples, on text and on images.

::

    model = build_model(run, UNet, PLAN)
    for step in train_steps(run, loader, optimizer, 40, samples=64):
        loss = local_loss(step.batch)  # forward
        step.log(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The batch has been fetched when the body begins (``dtd``); `Step.log` ends the forward (``dtf``), the optimizer's step
the backward (``dtb``), and the end of the body the rest (``dto``). Then the step is logged and recorded. The row is a
collective: every rank goes through every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.data.workers import read
from mmm.errors import ConfigError, DataError
from mmm.layout import Techniques
from mmm.models.cnn import CNN
from mmm.models.experts import has_experts
from mmm.models.transformer import Transformer
from mmm.parallel import Mesh, Plan, apply, build_mesh, materialize
from mmm.parallel.initial_weights import InitName
from mmm.parallel.local import detached
from mmm.parallel.values import Values
from mmm.runtime.seed import seed_step
from mmm.trainer.image_task import ImageTask, evaluate_images
from mmm.trainer.mistakes import STEPS, OneDevice, without_labels
from mmm.trainer.optimizer import learning_rate
from mmm.trainer.progress import epochs_bar
from mmm.trainer.resolve import Resolved
from mmm.trainer.run.core import Run
from mmm.trainer.run.tables import sharded_model
from mmm.trainer.text import ValidationOptions, validation_batches
from mmm.trainer.vision import ResolvedCNN


def on_mesh(
    run: Run,
    model: nn.Module,
    plan: Plan,
    techniques: Techniques,
    seed: int | None = None,
    init: InitName | None = None,
    values: Values | None = None,
) -> tuple[Mesh, nn.Module]:
    """The mesh, and on it what to train, with its initial weights; log it. A collective.

    Args:
        seed: None: the run's. init, values: as for `materialize`.
    """
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    trained = apply(model, mesh, plan, run.precision, techniques)
    materialize(trained, run.device, run.options.seed if seed is None else seed, init=init, values=values)
    run.log.info("%s\n%s", mesh, sharded_model(trained), stacklevel=3)
    return mesh, trained


@dataclass
class Step:
    """One optimizer step.

    Attributes:
        number: from 0. batch: this rank's samples of the global batch, on the run's device. last: of the run.
        due: whether the row is logged. row: further numbers of it, for the loop's body to add to.
    """

    run: Run
    number: int
    batch: Any
    last: bool = False
    due: bool = True
    row: dict[str, float | Tensor] = field(default_factory=dict)
    _losses: list[Tensor] = field(default_factory=list)

    @property
    def local_loss(self) -> Tensor:
        """This rank's, once `log` has been called: on the device. A ConfigError before."""
        if not self._losses:
            raise ConfigError(
                f"step {self.number} ended without step.log(loss): the body of the loop calls it once the forward is "
                "over, with this rank's part of the loss"
            )
        return sum(self._losses[1:], self._losses[0])

    def log(self, loss: Tensor) -> None:
        """The forward is over.

        Args:
            loss: of this rank's samples, divided by the global count. With micro-batches, of one of them: they add up.
        """
        self.run.clock.lap("dtf")
        self._losses.append(detached(loss))


def train_steps(
    run: Run,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    samples: int,
    tokens: int = 0,
    at: Mapping[str, int] | None = None,
    before_row: Callable[[Step], object] = lambda step: None,
    depth: int = 2,
) -> Iterator[Step]:
    """The steps of a loop, fetched, timed, logged and recorded around its body. Before each the default generators are
    seeded: what is drawn in it is a function of seed, step and data-parallel coordinate (`mmm.runtime.seed`).

    Args:
        batches: this rank's, one a step; `Step.batch` is one `on_device`.
        samples, tokens: in the global batch. at: what a row says besides its step, such as ``{"stage": 1}``.
        before_row: called between the body and the row.
        depth: as of `Run.row`.

    Raises:
        ConfigError: the body has not called `Step.log`.
        DataError: there are fewer batches than steps, or a data loader's worker fails.
        DivergedError: a loss that is not finite, on every rank.
    """
    rates = _laps_updates(run, optimizer)
    source, coordinate = read(batches, run.options.timeout, run.note), run.layout.dp_coordinate(run.rank.rank)
    for number in range(steps):
        run.clock.start()
        run.clock.step = number
        seed_step(run.options.seed, number, coordinate)
        if (batch := next(source, None)) is None:
            raise DataError(f"the data ended after {number} batches, and {steps} steps take one each")
        last = number == steps - 1
        step = Step(run, number, on_device(run, batch), last, due=last or number % run.options.log_every == 0)
        run.clock.lap("dtd")
        yield step
        run.clock.lap("dto")
        before_row(step)
        run.row(
            {**(at or {}), "iter": number},
            {"loss": step.local_loss},
            samples=samples,
            tokens=tokens,
            more={**rates, **step.row},
            due=step.due,
            depth=depth,
        )


def _laps_updates(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Let each update of an optimizer end the backward (``dtb``). ``lr``, of the newest, stands in what is returned."""
    rates: dict[str, float] = {}

    def before_update(*_: object) -> None:
        run.clock.lap("dtb")
        rates["lr"] = learning_rate(optimizer)

    optimizer.register_step_pre_hook(before_update)
    return rates


@torch.no_grad()
def evaluate(run: Run, batches: Iterable[Any], local_loss: Callable[[Any], Tensor]) -> float:
    """The mean over global batches of the loss. A collective.

    Args:
        batches: of this rank, each of which `local_loss` gets `on_device`, and gives this rank's part of the loss for.

    Raises:
        DataError: there is none.
    """
    read_ahead = read(batches, run.options.timeout, run.note)
    losses = [detached(local_loss(on_device(run, batch))) for batch in read_ahead]
    if not losses:
        raise DataError(
            "there is no batch to evaluate on: the data held out are fewer than a batch, or the iterator over them has "
            "been used up; give it a loader that begins anew each time"
        )
    return run.global_sum(sum(losses[1:], losses[0])) / len(losses)


def on_device(run: Run, batch: Any) -> Any:
    """A tensor, or those in a list, tuple or dict, on the run's device; floats in the dtype of the weights."""
    if isinstance(batch, Tensor):
        return batch.to(run.device, run.precision.storage if batch.is_floating_point() else None)
    if isinstance(batch, dict):
        return {name: on_device(run, part) for name, part in batch.items()}
    return [on_device(run, part) for part in batch] if isinstance(batch, list | tuple) else batch


def text_steps(
    run: Run,
    resolved: Resolved,
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    local_loss: Callable[[Batch], Tensor] | None = None,
    *,
    coordinate: int | None = None,
    at: Mapping[str, int] | None = None,
) -> Iterator[Step]:
    """The steps of a program that trains a Transformer on text.

    Args:
        model: what this rank trains; of a pipeline, its stages.
        local_loss: for validation, where the program has its flags: of the samples of this rank's data-parallel
            coordinate → this rank's part of the loss of a global batch.
        coordinate: whose samples these are. Default: this rank's data-parallel coordinate.
        at: what a row says besides its step, such as ``{"stage": 1}``.
    """
    options, steps = run.options, resolved.steps
    global_batch, tokens = resolved.global_batch_size, resolved.data.train
    if coordinate is None:
        coordinate = run.layout.dp_coordinate(run.rank.rank)
    one_device = None
    if options.break_ is not None:
        steps = min(steps, STEPS)
        with torch.device("meta"):
            full = Transformer(resolved.sizes)
        modules = [model] if isinstance(model, nn.Module) else model
        one_device = OneDevice(
            run,
            full,
            modules,
            optimizer,
            lambda step: tokens.batch(step, global_batch, 0, global_batch).to(run.device),
        )

    def before_row(step: Step) -> None:
        if local_loss is not None and isinstance(options, ValidationOptions) and options.validates(step.number, steps):
            with loss_parallel():
                batches = validation_batches(run, resolved, options.eval_batches)
                step.row["val_loss"] = evaluate(run, batches, local_loss)
            step.due = True
        if one_device is not None:
            one_device.loss(run.global_sum(step.local_loss))

    if not at:
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, tokens.seq_length, stacklevel=2)
    yield from train_steps(
        run,
        (resolved.local_batch(tokens, number, coordinate).to(run.device) for number in range(steps)),
        optimizer,
        steps,
        samples=global_batch,
        tokens=global_batch * tokens.seq_length,
        at=at,
        before_row=before_row,
        depth=3,
    )
    if one_device is not None:
        one_device.report()


def image_steps(
    run: Run, resolved: ResolvedCNN, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int | None = None
) -> Iterator[Step]:
    """The steps of a program that trains the CNN on images: one row, and one evaluation, an epoch.

    The learning rate falls after each epoch. `Step.batch` has images and labels as inputs and targets. With ``--break``
    half the images of the first data-parallel coordinate have no label, and dropout is off.

    Args:
        workers: processes that read images ahead.
    """

    def global_batch(step: int) -> Batch:
        images = task.loader.batches.batch(step).to(run.device, run.precision.storage)
        return without_labels(Batch(images.images, images.labels, images.count), 0, resolved.local_batch_size // 2)

    task = ImageTask(run, resolved, workers)
    steps, per_epoch, coordinate = resolved.steps, task.steps_per_epoch, run.layout.dp_coordinate(run.rank.rank)
    one_device = None
    if run.options.break_ is not None:
        steps = per_epoch = min(steps, STEPS)
        with torch.device("meta"):
            full = CNN(resolved.sizes)
        one_device = OneDevice(run, full, [model], optimizer, global_batch)
    rates = _laps_updates(run, optimizer)
    run.log.info("%s: %d steps of %d images", resolved.data.name, steps, resolved.global_batch_size, stacklevel=2)
    batches, losses = task.all_batches(), list[Tensor]()
    for number in epochs_bar(range(steps), per_epoch, run.rank):
        if not losses:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = resolved.lr * resolved.gamma ** (number // per_epoch)
            run.clock.start()
        run.clock.step = number
        batch = next(batches)
        if one_device is not None:
            batch = without_labels(batch, coordinate * resolved.local_batch_size, resolved.local_batch_size // 2)
        step = Step(run, number, batch, last=number == steps - 1)
        run.clock.lap("dtd")
        yield step
        run.clock.lap("dto")
        losses.append(step.local_loss)
        if one_device is not None:
            one_device.loss(run.global_sum(step.local_loss))
        if (number + 1) % per_epoch == 0 or step.last:
            run.row(
                {"epoch": number // per_epoch + 1},
                {"train_loss": sum(losses[1:], losses[0]) / len(losses)},
                samples=len(losses) * resolved.global_batch_size,
                more={**rates, **step.row, **evaluate_images(run, model, task.test_loader)},
                depth=2,
            )
            losses.clear()
    if one_device is not None:
        one_device.report()
