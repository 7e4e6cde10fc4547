"""This rank's images of each step, and how well a model does on those of the test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.data import Batch
from mmm.data.images.batches import BatchOrder, ImageLoader, evaluation
from mmm.layout import PADDING
from mmm.nn.dropout import has_dropout, sample_keys
from mmm.parallel.local import detached
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.trainer.job import Job

# Test images of one forward on a data-parallel coordinate, at least.
TEST_BATCH = 64


class ImageBatches:
    """The batches of a data-parallel coordinate, on the run's device.

    Args:
        run: the run.
        job: the job.
        workers: number of processes that read images ahead. None: the loader decides.

    Attributes:
        steps_per_epoch: number of optimizer steps in an epoch.
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
        local_batches = -(-TEST_BATCH // job.local_batch_size)
        test_batch = local_batches * job.local_batch_size
        self.test_loader = evaluation(job.data.test, test_batch, coordinate, run.layout.dp, **loading)

    def from_step(self, first: int) -> Iterator[Batch]:
        """Yield one batch for each step, epoch after epoch, without end."""
        run = self.run
        epoch, step_of_epoch = divmod(first, self.steps_per_epoch)
        step = first
        while True:
            for batch in self.loader.epoch(epoch, step_of_epoch):
                batch = batch.to(run.device)
                keys = None
                if self.has_dropout:
                    # Each sample has a key, which decides what dropout drops of it, on any mesh.
                    first_sample = self.loader.first_sample
                    keys = sample_keys(run.seed, step, first_sample, len(batch.targets), run.device)
                # (local batch, channels, height, width), in the dtype of the weights
                images = batch.inputs.to(run.precision.storage)
                yield Batch(images, batch.targets, batch.count, sample_keys=keys)
                step += 1
            epoch += 1
            step_of_epoch = 0


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss summed over the images, a scalar.

    Args:
        logits: (batch, classes).
        labels: (batch,); images with the label `PADDING` do not count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=PADDING)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of images that are classified correctly, a scalar. Padding never is."""
    return (logits.argmax(1) == labels).sum()


def evaluate_images(run: Run, measure: Callable[[Batch], Tensor], loader: ImageLoader) -> dict[str, float]:
    """Mean loss ``test_loss`` and accuracy ``test_acc`` in percent. A collective, inside `Run.evaluating`.

    Args:
        run: the run.
        measure: returns `summed_loss` and `correct` of a model for a batch, (2,) float64.
        loader: a loader of `mmm.data.images.batches.evaluation`. What only fills up a batch has the label `PADDING`.
    """
    sums: Tensor | None = None
    for batch in loader.epoch():
        batch = batch.to(run.device)
        images = batch.inputs.to(run.precision.storage)
        measured = measure(Batch(images, batch.targets, batch.count))
        # Summed on the device: the host waits once, below.
        sums = measured if sums is None else sums + measured
    assert sums is not None
    n_images = loader.batches.image_set.samples
    loss_sum, n_correct = run.global_sums(sums)
    return {"test_loss": loss_sum / n_images, "test_acc": 100 * (n_correct / n_images)}


def evaluate(run: Run, model: ParallelModel, batches: ImageBatches) -> dict[str, float]:
    """`evaluate_images` for a model on the test set. A collective."""
    with run.evaluating(model):
        return evaluate_images(run, lambda batch: model.measure(batch, summed_loss, correct), batches.test_loader)


def measure_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    """The argument `measure` of `evaluate_images`, for a plain module."""

    def measure(batch: Batch) -> Tensor:
        logits = model(batch.inputs)
        loss = summed_loss(logits, batch.targets)
        n_correct = correct(logits, batch.targets)
        return torch.stack([detached(loss), detached(n_correct)])

    return measure
