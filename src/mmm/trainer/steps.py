"""The steps of an example's loop (`mmm.trainer.script`), on text or on images, with their evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from mmm.data import Batch
from mmm.models.cnn import CNN
from mmm.models.transformer import Transformer
from mmm.runtime.seed import seed_step
from mmm.trainer.mistakes import STEPS, OneDevice, without_labels
from mmm.trainer.progress import epochs_bar
from mmm.trainer.resolve import Resolved
from mmm.trainer.run import Run
from mmm.trainer.script import Step, train_steps
from mmm.trainer.tasks import ImageTask, evaluate_images
from mmm.trainer.text import ValidationOptions, validate
from mmm.trainer.vision import ResolvedCNN


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
            step.row["val_loss"] = validate(run, resolved, options.eval_batches, local_loss)
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
