"""What an example needs that trains the CNN on images: its steps, and how well the net does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from mmm.data import Batch
from mmm.data.images.batches import ImageBatches as BatchOrder
from mmm.layout import PADDING
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.trainer.images import ImageBatches, evaluate_images, measure_of
from mmm.trainer.job import Job


def image_steps(run: Run, job: Job, batches: ImageBatches) -> Iterator[Step]:
    """`Run.steps` of a program that trains on images: one row, and one evaluation, an epoch."""
    samples = job.global_batch_size
    run.log.info("%s: %d steps of %d images", job.data.name, job.steps, samples, stacklevel=2)
    return run.steps(batches, job.steps, samples=samples, eval_every=0, epoch=batches.steps_per_epoch)


def test_numbers(run: Run, model: nn.Module, batches: ImageBatches) -> dict[str, float]:
    """Loss and accuracy on the test set: every image counts once. A collective."""
    with run.evaluating(model):
        return evaluate_images(run, measure_of(model), batches.test_loader)


def without_labels(job: Job, batch: Batch, first_sample: int) -> Batch:
    """A batch in which half of the first rank's samples have no label: the ranks' counts are then uneven.

    Args:
        first_sample: which sample of the global batch is the first of `batch`.
    """
    missing = job.local_batch_size // 2
    sample = first_sample + torch.arange(len(batch.targets), device=batch.targets.device)
    return replace(batch, targets=batch.targets.masked_fill(sample < missing, PADDING), count=batch.count - missing)


def global_images(run: Run, step: int) -> Batch:
    """The whole global batch of a step, `without_labels`, on the run's device."""
    order = BatchOrder(run.job.data.train, run.job.global_batch_size, run.seed)
    batch = order.batch(step).to(run.device)
    batch = replace(batch, inputs=batch.inputs.to(run.precision.storage))
    return without_labels(run.job, batch, 0)
