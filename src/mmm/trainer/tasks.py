"""What the training loop trains on: where batches come from, what the loss is, how the model is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.data import Batch, Tokens
from mmm.data.image_batches import ImageBatch, ImageBatches, ImageLoader, evaluation
from mmm.data.images import ImageData
from mmm.parallel.parallel_model import ParallelModel
from mmm.trainer.run import Run

PADDING = -100  # a label that cross-entropy passes over: PyTorch's default
TEST_BATCH = 64


class Task(ABC):
    """A task, as one rank sees it: its own part of each global batch.

    Attributes:
        global_batch: samples of an optimizer step. tokens: targets of it, where they are tokens, else 0.
        steps_per_epoch: optimizer steps.
    """

    global_batch: int
    tokens: int = 0
    steps_per_epoch: int

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[Batch]:
        """This data-parallel coordinate's batches of an epoch, one an optimizer step, on the run's device."""

    @abstractmethod
    def evaluate(self, model: ParallelModel) -> dict[str, float]:
        """Judge the model on held-out data. A collective; the same numbers on every rank."""

    def all_batches(self) -> Iterator[Batch]:
        """Epoch after epoch, without end."""
        epoch = 0
        while True:
            yield from self.batches(epoch)
            epoch += 1


def fitting_eval_batches(run: Run, validation: Tokens, global_batch: int, asked: int) -> int:
    """How many global batches a validation has: where the text has fewer than asked for, those, and a note says so."""
    there = validation.steps_per_epoch(global_batch)
    cut = f"validation: {there} global batches instead of {asked}, all that the text has"
    if there < asked and cut not in run.notes:
        run.note(cut)
    return min(asked, there)


class TokenTask(Task):
    """The next token of a text."""

    def __init__(self, run: Run, train: Tokens, validation: Tokens, batch: int, global_batch: int, eval_batches: int):
        self.run, self.train, self.validation = run, train, validation
        self.size, self.global_batch = batch, global_batch
        self.eval_batches = fitting_eval_batches(run, validation, global_batch, eval_batches)
        self.first = run.layout.dp_coordinate(run.rank.rank) * batch
        self.tokens = global_batch * train.seq_length
        self.steps_per_epoch = train.steps_per_epoch(global_batch)

    def _batch(self, tokens: Tokens, step: int) -> Batch:
        return tokens.batch(step, self.global_batch, self.first, self.size).to(self.run.device)

    def batches(self, epoch: int) -> Iterator[Batch]:
        for step in range(self.steps_per_epoch):
            yield self._batch(self.train, epoch * self.steps_per_epoch + step)

    def evaluate(self, model: ParallelModel) -> dict[str, float]:
        """Mean loss ``val_loss`` over the first global batches of the validation tokens: the same ones every time."""
        total = 0.0
        for step in range(self.eval_batches):
            batch = self._batch(self.validation, step)
            total += model.evaluate(batch.inputs, batch.targets, batch.count).item()
        return {"val_loss": self.run.global_sum(total) / self.eval_batches}


class ImageTask(Task):
    """The class of an image. Every image of the test set counts once, whatever the number of ranks."""

    def __init__(self, run: Run, data: ImageData, batch: int, global_batch: int, workers: int | None = None):
        coordinate, dp = run.layout.dp_coordinate(run.rank.rank), run.layout.dp
        loading: dict[str, Any] = {"workers": workers, "pin_memory": run.device.type == "cuda"}
        self.run, self.data, self.global_batch = run, data, global_batch
        sequence = ImageBatches(data.train, global_batch, run.options.seed)
        self.loader = sequence.loader(coordinate, dp, **loading)
        at_once = -(-TEST_BATCH // batch) * batch  # whole batches: a pipeline cuts them into its micro-batches
        self.test_loader = evaluation(data.test, at_once, coordinate, dp, **loading)
        self.steps_per_epoch = sequence.steps_per_epoch

    def batches(self, epoch: int) -> Iterator[Batch]:
        for batch in self.loader.epoch(epoch):
            part = batch.to(self.run.device, self.run.precision.storage)
            yield Batch(part.images, part.labels, part.count)

    def evaluate(self, model: ParallelModel) -> dict[str, float]:
        return evaluate_images(self.run, model, self.test_loader)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=PADDING)


def right_ones(logits: Tensor, labels: Tensor) -> Tensor:
    """How many images get their own class."""
    return (logits.argmax(1) == labels).sum()


@torch.no_grad()
def evaluate_images(run: Run, model: nn.Module | ParallelModel, loader: ImageLoader) -> dict[str, float]:
    """Mean loss ``test_loss`` and accuracy ``test_acc`` in percent, dropout off. A collective.

    Args:
        loader: of `mmm.data.image_batches.evaluation`: what only pads a batch has weight 0.
    """
    model.train(False)
    sums, images = torch.zeros(2, dtype=torch.float64), loader.batches.image_set.samples
    for batch in loader.epoch():
        batch = batch.to(run.device, run.precision.storage)
        sums += _measure(model, batch).cpu()
    loss, right = (run.global_sum(float(value)) / images for value in sums)
    return {"test_loss": loss, "test_acc": 100 * right}


def _measure(model: nn.Module | ParallelModel, batch: ImageBatch) -> Tensor:
    """`summed_loss` and `right_ones` of a batch, (2,) float64."""
    labels = batch.labels.masked_fill(batch.weights == 0, PADDING)
    if isinstance(model, ParallelModel):
        return model.measure(batch.images, labels, summed_loss, right_ones)
    logits = model(batch.images)
    return torch.tensor([float(summed_loss(logits, labels)), float(right_ones(logits, labels))], dtype=torch.float64)
