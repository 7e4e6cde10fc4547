"""The steps of an example's loop: fetching, timing, logging and evaluation around what the example shows.

::

    for step in text_steps(run, resolved, model, optimizer, local_loss):
        loss = local_loss(step.batch)  # forward
        step.log(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The batch has been fetched when the body begins (``dtd``); `Step.log` ends the forward (``dtf``), the optimizer's step
the backward (``dtb``), and the end of the body the rest (``dto``). Then the step is evaluated where that is due, logged
and recorded. The row is a collective: every rank goes through every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmm.data import Batch
from mmm.models.cnn import CNN
from mmm.models.transformer import Transformer
from mmm.parallel.loss import detached
from mmm.runtime.seed import seed_step
from mmm.trainer.mistakes import STEPS, OneDevice, without_labels
from mmm.trainer.progress import epochs_bar
from mmm.trainer.resolve import Resolved
from mmm.trainer.run import Run
from mmm.trainer.tasks import ImageTask, evaluate_images
from mmm.trainer.text import ValidationOptions, validate
from mmm.trainer.vision import ResolvedCNN


@dataclass
class Step:
    """One optimizer step.

    Attributes:
        number: from 0. batch: this rank's samples of the global batch, on the run's device. last: of the run.
        due: whether the row is logged. row: further numbers of it, for the loop's body to add to.
    """

    run: Run
    number: int
    batch: Batch
    last: bool = False
    due: bool = True
    row: dict[str, float | Tensor] = field(default_factory=dict)
    _losses: list[Tensor] = field(default_factory=list)

    @property
    def local_loss(self) -> Tensor:
        """This rank's, once `log` has been called: on the device."""
        return sum(self._losses[1:], self._losses[0])

    def log(self, loss: Tensor) -> None:
        """The forward is over.

        Args:
            loss: of this rank's samples, divided by the global count. With micro-batches, of one of them: they add up.
        """
        self.run.clock.lap("dtf")
        self._losses.append(detached(loss))


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
    optimizer.register_step_pre_hook(lambda *_: run.clock.lap("dtb"))
    if not at:
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, tokens.seq_length, stacklevel=2)
    for number in range(steps):
        run.clock.start()
        run.clock.step = number
        batch = resolved.local_batch(tokens, number, coordinate).to(run.device)
        run.clock.lap("dtd")
        last = number == steps - 1
        step = Step(run, number, batch, last, due=last or number % options.log_every == 0)
        yield step
        run.clock.lap("dto")
        if local_loss is not None and isinstance(options, ValidationOptions) and options.validates(number, steps):
            step.row["val_loss"] = validate(run, resolved, options.eval_batches, local_loss)
            step.due = True
        run.row(
            {**(at or {}), "iter": number},
            {"loss": step.local_loss},
            samples=global_batch,
            tokens=batch.count,
            more=step.row,
            due=step.due,
            depth=2,
        )
        if one_device is not None:
            one_device.loss(run.global_sum(step.local_loss))
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

    def whole_batch(step: int) -> Batch:
        images = task.loader.batches.batch(step).to(run.device, run.precision.storage)
        return without_labels(Batch(images.images, images.labels, images.count), 0, resolved.local_batch_size // 2)

    task = ImageTask(run, resolved, workers)
    steps, per_epoch, coordinate = resolved.steps, task.steps_per_epoch, run.layout.dp_coordinate(run.rank.rank)
    one_device = None
    if run.options.break_ is not None:
        steps = per_epoch = min(steps, STEPS)
        with torch.device("meta"):
            full = CNN(resolved.sizes)
        one_device = OneDevice(run, full, [model], optimizer, whole_batch)
    optimizer.register_step_pre_hook(lambda *_: run.clock.lap("dtb"))
    run.log.info("%s: %d steps of %d images", resolved.data.name, steps, resolved.global_batch_size, stacklevel=2)
    batches, losses = task.all_batches(), list[Tensor]()
    for number in epochs_bar(range(steps), per_epoch, run.rank):
        if not losses:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = resolved.lr * resolved.gamma ** (number // per_epoch)
            run.clock.start()
        run.clock.step = number
        seed_step(run.options.seed, number, coordinate)  # for dropout
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
                more={**step.row, **evaluate_images(run, model, task.test_loader)},
                depth=2,
            )
            losses.clear()
    if one_device is not None:
        one_device.report()
