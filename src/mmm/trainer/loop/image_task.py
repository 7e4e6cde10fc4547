"""Images to train on, and how a model is evaluated on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.data import Batch
from mmm.data.images.batches import ImageBatches, ImageLoader, evaluation
from mmm.layout import PADDING
from mmm.nn.dropout import sample_keys
from mmm.parallel.local import detached
from mmm.trainer.job import Job
from mmm.trainer.loop.tasks import Task
from mmm.trainer.run.core import Run

if TYPE_CHECKING:
    from mmm.parallel.parallel_model import ParallelModel

TEST_BATCH = 64


class ImageTask(Task):
    """The class of an image. Every image of the test set counts once, whatever the number of ranks."""

    def __init__(self, run: Run, resolved: Job, workers: int | None = None):
        coordinate, dp, data = run.layout.dp_coordinate(run.rank.rank), run.layout.dp, resolved.data
        loading: dict[str, Any] = {
            "workers": workers,
            "timeout": run.options.timeout,
        }
        self.run, self.global_batch_size = run, resolved.global_batch_size
        sequence = ImageBatches(data.train, self.global_batch_size, run.seed)
        self.loader = ImageLoader(sequence, coordinate, dp, **loading)
        batch = resolved.local_batch_size
        at_once = -(-TEST_BATCH // batch) * batch  # a multiple: a pipeline splits it into its micro-batches
        self.test_loader = evaluation(data.test, at_once, coordinate, dp, **loading)
        self.steps_per_epoch = sequence.steps_per_epoch

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        seed, first_sample = self.run.seed, self.loader.first_sample
        for step, batch in enumerate(self.loader.epoch(epoch, first), start=epoch * self.steps_per_epoch + first):
            batch = batch.to(self.run.device)
            keys = sample_keys(seed, step, first_sample, len(batch.targets), self.run.device)
            images = batch.inputs.to(self.run.precision.storage)
            yield Batch(images, batch.targets, batch.count, sample_keys=keys)

    def evaluate(self, model: ParallelModel) -> dict[str, float]:
        model.train(False)
        return evaluate_images(self.run, lambda *batch: model.measure(*batch, summed_loss, correct), self.test_loader)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=PADDING)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many images are classified correctly."""
    return (logits.argmax(1) == labels).sum()


@torch.no_grad()
def evaluate_images(run: Run, measure: Callable[[Tensor, Tensor], Tensor], loader: ImageLoader) -> dict[str, float]:
    """Mean loss ``test_loss`` and accuracy ``test_acc`` in percent. A collective.

    Args:
        measure: of images and labels, `summed_loss` and `correct` of a model in evaluation mode, (2,) float64.
        loader: of `mmm.data.images.batches.evaluation`: what only pads a batch has the label `PADDING`.
    """
    images = loader.batches.image_set.samples
    batches = (batch.to(run.device) for batch in loader.epoch())
    first, *others = (measure(batch.inputs.to(run.precision.storage), batch.targets) for batch in batches)
    loss, right = (total / images for total in run.global_sums(sum(others, first)))
    return {"test_loss": loss, "test_acc": 100 * right}


def measure_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """`evaluate_images`'s of a plain module, which is set to evaluation mode."""
    model.eval()

    def measure(images: Tensor, labels: Tensor) -> Tensor:
        logits = model(images)
        return torch.stack([detached(summed_loss(logits, labels)), detached(correct(logits, labels))])

    return measure
