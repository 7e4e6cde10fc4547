"""The steps of an example that trains the CNN on images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmm.data import Batch
from mmm.examples._support.mistakes import STEPS, OneDevice, mistake_of
from mmm.layout import PADDING
from mmm.models.cnn.model import CNN
from mmm.trainer.job import Job
from mmm.trainer.loop.image_task import ImageTask, evaluate_images, measure_of
from mmm.trainer.run.core import Run
from mmm.trainer.run.steps import Step, laps_updates


def image_steps(
    run: Run, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int | None = None
) -> Iterator[Step]:
    """The steps of a program that trains the CNN on images: one row, and one evaluation, an epoch.

    The learning rate falls after each epoch. `Step.batch` has images and labels as inputs and targets. With ``--break``
    half the images of the first data-parallel coordinate have no label, and dropout is off.

    Args:
        workers: processes that read images ahead.
    """

    def global_batch(step: int) -> Batch:
        batch = task.loader.batches.batch(step).to(run.device)
        batch = replace(batch, inputs=batch.inputs.to(run.precision.storage))
        return without_labels(batch, 0, job.local_batch_size // 2)

    task = ImageTask(run, job, workers)
    steps, per_epoch, coordinate = job.steps, task.steps_per_epoch, run.layout.dp_coordinate(run.rank.rank)
    one_device = None
    if mistake_of(run) is not None:
        steps = per_epoch = min(steps, STEPS)
        with torch.device("meta"):
            full = CNN(job.sizes)
        one_device = OneDevice(run, full, [model], optimizer, global_batch)
    rates = laps_updates(run, optimizer)
    run.log.info("%s: %d steps of %d images", job.data.name, steps, job.global_batch_size, stacklevel=2)
    batches, losses = task.all_batches(), list[Tensor]()
    for number in range(steps):
        if not losses:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = job.lr * job.gamma ** (number // per_epoch)
            run.clock.start()
        run.clock.step = number
        batch = next(batches)
        if one_device is not None:
            batch = without_labels(batch, coordinate * job.local_batch_size, job.local_batch_size // 2)
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
                samples=len(losses) * job.global_batch_size,
                more={**rates, **step.row, **evaluate_images(run, measure_of(model), task.test_loader)},
                depth=2,
            )
            losses.clear()
    if one_device is not None:
        one_device.report()


def without_labels(batch: Batch, first_sample: int, without: int) -> Batch:
    """`batch`, where the first `without` samples of the global batch have no label: ranks' counts are then uneven.

    Args:
        batch: of samples with one target each. first_sample: which of the global batch its first one is.
    """
    sample = first_sample + torch.arange(len(batch.targets), device=batch.targets.device)
    return Batch(batch.inputs, batch.targets.masked_fill(sample < without, PADDING), batch.count - without)
