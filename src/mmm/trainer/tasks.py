"""What the training loop trains on: where batches come from, what the loss is, how the model is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch, Tokens
from mmm.data.image_batches import ImageBatch, ImageBatches, ImageLoader, evaluation
from mmm.data.images import ImageData, check_same
from mmm.parallel import cross_entropy, local_value
from mmm.trainer.run import Run

B = TypeVar("B")


class Task(ABC, Generic[B]):
    """A task, as one rank sees it: its own part of each global batch.

    Attributes:
        global_batch: samples of an optimizer step. tokens: targets of it, where they are tokens, else 0.
        steps_per_epoch: optimizer steps.
    """

    global_batch: int
    tokens: int = 0
    steps_per_epoch: int

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[B]:
        """This rank's batches of an epoch, one an optimizer step."""

    @abstractmethod
    def micro_batches(self, batch: B, parts: int) -> Iterator[B]:
        """A batch in `parts` pieces on the run's device, whose losses add up to that of the whole."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: B) -> Tensor:
        """This rank's share of the global mean loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Judge the model on held-out data. A collective; the same numbers on every rank."""


def _pieces(size: int, parts: int) -> Iterator[slice]:
    """0 … size in `parts` stretches that differ by one at most."""
    for i in range(parts):
        yield slice(size * i // parts, size * (i + 1) // parts)


class TokenTask(Task[Batch]):
    """The next token of a text."""

    def __init__(self, run: Run, train: Tokens, validation: Tokens, batch: int, global_batch: int, eval_batches: int):
        self.run, self.train, self.validation = run, train, validation
        self.size, self.global_batch, self.eval_batches = batch, global_batch, eval_batches
        self.first = run.layout.dp_coordinate(run.rank.rank) * batch
        self.tokens = global_batch * train.seq_length
        self.steps_per_epoch = train.steps_per_epoch(global_batch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        for step in range(self.steps_per_epoch):
            yield self.train.batch(epoch * self.steps_per_epoch + step, self.global_batch, self.first, self.size)

    def micro_batches(self, batch: Batch, parts: int) -> Iterator[Batch]:
        for rows in _pieces(self.size, parts):
            yield Batch(batch.inputs[rows], batch.targets[rows], batch.count).to(self.run.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch.inputs), batch.targets, batch.count)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        total = 0.0
        batches = min(self.eval_batches, self.validation.steps_per_epoch(self.global_batch))
        for step in range(batches):
            batch = self.validation.batch(step, self.global_batch, self.first, self.size)
            with loss_parallel():
                total += local_value(self.loss(model, batch.to(self.run.device)))
        return {"val_loss": self.run.global_sum(total) / batches}


def same_images(run: Run, data: ImageData) -> None:
    """Say what stands in for the data asked for, and refuse a run whose ranks read different data. A collective.

    Raises:
        DataError: one host has a data set and another does not, say.
    """
    if data.note:
        run.note(data.note)
    mine: Any = (run.ranks[run.rank.rank]["host"], data.name, data.sha256)
    everyone = [mine] * run.rank.world_size
    if run.rank.world_size > 1:
        dist.all_gather_object(everyone, mine)
    check_same(everyone)


class ImageTask(Task[ImageBatch]):
    """The class of an image. Every image of the test set counts once, whatever the number of ranks."""

    def __init__(self, run: Run, data: ImageData, batch: int, global_batch: int, workers: int | None = None):
        coordinate, dp = run.layout.dp_coordinate(run.rank.rank), run.layout.dp
        loading: dict[str, Any] = {"workers": workers, "pin_memory": run.device.type == "cuda"}
        self.run, self.data, self.size, self.global_batch = run, data, batch, global_batch
        sequence = ImageBatches(data.train, global_batch, run.options.seed)
        self.loader = sequence.loader(coordinate, dp, **loading)
        self.test_loader = evaluation(data.test, max(batch, 64), coordinate, dp, **loading)
        self.steps_per_epoch = sequence.steps_per_epoch

    def batches(self, epoch: int) -> Iterator[ImageBatch]:
        return self.loader.epoch(epoch)

    def micro_batches(self, batch: ImageBatch, parts: int) -> Iterator[ImageBatch]:
        for rows in _pieces(self.size, parts):
            piece = ImageBatch(
                batch.images[rows], batch.labels[rows], batch.weights[rows], batch.indices[rows], batch.count
            )
            yield piece.to(self.run.device, self.run.precision.storage)

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        return cross_entropy(model(batch.images), batch.labels, batch.count)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return judge_images(self.run, model, self.test_loader)


@torch.no_grad()
def judge_images(run: Run, model: nn.Module, loader: ImageLoader) -> dict[str, float]:
    """Mean loss ``test_loss`` and accuracy ``test_acc`` in percent, dropout off. A collective.

    Args:
        loader: of `mmm.data.image_batches.evaluation`: what only pads a batch has weight 0.
    """
    model.eval()
    loss, right, images = 0.0, 0.0, loader.batches.image_set.samples
    for batch in loader.epoch():
        batch = batch.to(run.device, run.precision.storage)
        logits = model(batch.images)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss += float((F.cross_entropy(wide, batch.labels, reduction="none") * batch.weights).sum())
        right += float(((logits.argmax(1) == batch.labels) * batch.weights).sum())
    return {"test_loss": run.global_sum(loss) / images, "test_acc": 100 * run.global_sum(right) / images}
