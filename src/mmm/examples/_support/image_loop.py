"""The steps of an example that trains the CNN on images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from mmm.data import Batch
from mmm.examples._support.mistakes import STEPS, OneDevice, mistake_of
from mmm.layout import PADDING
from mmm.models.cnn.model import CNN
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.trainer.images import ImageBatches, evaluate_images, measure_of
from mmm.trainer.job import Job
from mmm.trainer.rate import LearningRate, step_decay


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
        batch = batches.order.batch(step).to(run.device)
        batch = replace(batch, inputs=batch.inputs.to(run.precision.storage))
        return without_labels(batch, 0, job.local_batch_size // 2)

    batches = ImageBatches(run, job, workers)
    steps = job.steps
    per_epoch = batches.steps_per_epoch
    local_batch_size = job.local_batch_size
    first_sample = run.layout.dp_coordinate(run.rank.rank) * local_batch_size
    one_device = None
    if mistake_of(run) is not None:
        steps = per_epoch = min(steps, STEPS)
        with torch.device("meta"):
            full = CNN(job.sizes)
        one_device = OneDevice(run, full, [model], optimizer, global_batch)
    rate = LearningRate(optimizer, step_decay(per_epoch, job.gamma))
    run.log.info("%s: %d steps of %d images", job.data.name, steps, job.global_batch_size, stacklevel=2)
    run.state(optimizer=optimizer)
    for step in run.steps(batches, steps, samples=job.global_batch_size, eval_every=0, epoch=per_epoch):
        rate.set(step.number)
        if one_device is not None:
            step.batch = without_labels(step.batch, first_sample, local_batch_size // 2)
        yield step
        if one_device is not None:
            one_device.loss(run.global_sum(step.local_loss))
        if step.evaluates:
            with run.evaluating(model):
                step.row |= evaluate_images(run, measure_of(model), batches.test_loader)
    if one_device is not None:
        one_device.report()


def without_labels(batch: Batch, first_sample: int, without: int) -> Batch:
    """`batch`, where the first `without` samples of the global batch have no label: ranks' counts are then uneven.

    Args:
        batch: of samples with one target each. first_sample: which of the global batch its first one is.
    """
    sample = first_sample + torch.arange(len(batch.targets), device=batch.targets.device)
    return Batch(batch.inputs, batch.targets.masked_fill(sample < without, PADDING), batch.count - without)
