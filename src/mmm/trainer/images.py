"""This rank's images of each step, and how well a model does on those of the test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.data import Batch
from mmm.data.images.batches import ImageBatches as BatchOrder
from mmm.data.images.batches import ImageLoader, evaluation
from mmm.layout import PADDING
from mmm.nn.dropout import has_dropout, sample_keys
from mmm.parallel.local import detached
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.trainer.job import Job

TEST_BATCH = 64


class ImageBatches:
    """The batches of a data-parallel coordinate, on the run's device.

    Args:
        workers: processes that read images ahead.

    Attributes:
        steps_per_epoch: optimizer steps.
        test_loader: every image of the test set once, whatever the number of ranks.
    """

    def __init__(self, run: Run, job: Job, workers: int | None = None) -> None:
        coordinate = run.layout.dp_coordinate(run.rank.rank)
        loading: dict[str, Any] = {"workers": workers, "timeout": run.options.timeout}
        self.run = run
        self.order = BatchOrder(job.data.train, job.global_batch_size, run.seed)
        self.loader = ImageLoader(self.order, coordinate, run.layout.dp, **loading)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.has_dropout = has_dropout(job.model)
        # A multiple of the local batch: a pipeline splits it into its micro-batches.
        at_once = -(-TEST_BATCH // job.local_batch_size) * job.local_batch_size
        self.test_loader = evaluation(job.data.test, at_once, coordinate, run.layout.dp, **loading)

    def from_step(self, first: int) -> Iterator[Batch]:
        """One batch a step, epoch after epoch, without end."""
        run = self.run
        epoch, step_of_epoch = divmod(first, self.steps_per_epoch)
        step = first
        while True:
            for batch in self.loader.epoch(epoch, step_of_epoch):
                batch = batch.to(run.device)
                keys = None
                if self.has_dropout:
                    # The keys of its samples decide what dropout drops, on any mesh.
                    first_sample = self.loader.first_sample
                    keys = sample_keys(run.seed, step, first_sample, len(batch.targets), run.device)
                images = batch.inputs.to(run.precision.storage)
                yield Batch(images, batch.targets, batch.count, sample_keys=keys)
                step += 1
            epoch += 1
            step_of_epoch = 0


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=PADDING)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many images are classified correctly."""
    return (logits.argmax(1) == labels).sum()


def evaluate_images(run: Run, measure: Callable[[Batch], Tensor], loader: ImageLoader) -> dict[str, float]:
    """Mean loss ``test_loss`` and accuracy ``test_acc`` in percent. A collective, inside `Run.evaluating`.

    Args:
        measure: of a batch, `summed_loss` and `correct` of a model, (2,) float64.
        loader: of `mmm.data.images.batches.evaluation`: what only pads a batch has the label `PADDING`.
    """
    sums: Tensor | None = None
    for batch in loader.epoch():
        batch = batch.to(run.device)
        images = batch.inputs.to(run.precision.storage)
        measured = measure(Batch(images, batch.targets, batch.count))
        sums = measured if sums is None else sums + measured
    assert sums is not None
    loss, right = (total / loader.batches.image_set.samples for total in run.global_sums(sums))
    return {"test_loss": loss, "test_acc": 100 * right}


def evaluate(run: Run, model: ParallelModel, batches: ImageBatches) -> dict[str, float]:
    """`evaluate_images` of a model on the test set. A collective."""
    with run.evaluating(model):
        return evaluate_images(run, lambda batch: model.measure(batch, summed_loss, correct), batches.test_loader)


def measure_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    """`evaluate_images`'s of a plain module."""

    def measure(batch: Batch) -> Tensor:
        logits = model(batch.inputs)
        return torch.stack([detached(summed_loss(logits, batch.targets)), detached(correct(logits, batch.targets))])

    return measure
