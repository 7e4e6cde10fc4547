"""The steps of an example that trains the CNN on images, and how well the net does on the test set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from mmm.data import Batch
from mmm.data.images.batches import BatchOrder
from mmm.layout import PADDING
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.trainer.images import ImageBatches, evaluate_images, measure_of
from mmm.trainer.job import Job


def image_steps(run: Run, job: Job, batches: ImageBatches) -> Iterator[Step]:
    """`Run.steps` of a program that trains on images: there is one row and one evaluation per epoch."""
    samples = job.global_batch_size
    run.log.info("%s: %d steps of %d images", job.data.name, job.steps, samples, stacklevel=2)
    # eval_every=0: no evaluations besides those that end an epoch.
    return run.steps(
        batches,
        job.steps,
        samples=samples,
        eval_every=0,
        epoch=batches.steps_per_epoch,
    )


def evaluate_net(run: Run, model: nn.Module, batches: ImageBatches) -> dict[str, float]:
    """Loss and accuracy on the test set, where every image counts once. A collective of all ranks."""
    with run.evaluating(model):
        return evaluate_images(run, measure_of(model), batches.test_loader)


def without_labels(job: Job, batch: Batch, first_sample: int) -> Batch:
    """The batch without the labels of half of the first rank's samples, so that ranks have different counts.

    Args:
        first_sample: position of the first sample of `batch` in the global batch.
    """
    missing = job.local_batch_size // 2
    # (local batch,): position of each sample in the global batch.
    sample = first_sample + torch.arange(len(batch.targets), device=batch.targets.device)
    targets = batch.targets.masked_fill(sample < missing, PADDING)
    return replace(batch, targets=targets, count=batch.count - missing)


def global_images(run: Run, step: int) -> Batch:
    """The global batch of a step, `without_labels`, on the run's device. One device trains on it."""
    order = BatchOrder(run.job.data.train, run.job.global_batch_size, run.seed)
    batch = order.batch(step).to(run.device)
    inputs = batch.inputs.to(run.precision.storage)
    return without_labels(run.job, replace(batch, inputs=inputs), 0)
