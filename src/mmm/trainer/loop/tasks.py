"""What the training loop trains on: where batches come from, what the loss is, how the model is evaluated.

Text here, images in `mmm.trainer.loop.image_task`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from torch import Tensor

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.data import Batch, Tokens
from mmm.errors import DataError
from mmm.nn.dropout import has_dropout, sample_keys
from mmm.trainer.job import Job
from mmm.trainer.run.core import Run

if TYPE_CHECKING:
    from mmm.parallel.parallel_model import ParallelModel


class Task(ABC):
    """A task, as one rank sees it: its own samples of each global batch.

    Attributes:
        global_batch_size: samples of an optimizer step. tokens: targets of it, where they are tokens, else 0.
        steps_per_epoch: optimizer steps.
        metadata: what a checkpoint keeps for those who sample from it.
    """

    global_batch_size: int
    tokens: int = 0
    steps_per_epoch: int
    metadata: ModelMetadata = ModelMetadata()

    @abstractmethod
    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This data-parallel coordinate's batches of an epoch from the step `first` of it on, one an optimizer step,
        on the run's device."""

    @abstractmethod
    def evaluate(self, model: ParallelModel) -> dict[str, float]:
        """Evaluate the model on held-out data. A collective; the same numbers on every rank."""

    def all_batches(self, step: int = 0) -> Iterator[Batch]:
        """Epoch after epoch, without end, from an optimizer step on."""
        epoch, first = divmod(step, self.steps_per_epoch)
        while True:
            yield from self.batches(epoch, first)
            epoch, first = epoch + 1, 0


def fetched_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each fetched by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield batch


class TokenTask(Task):
    """The next token of a text.

    Args:
        eval_train: evaluate as many batches of the training text as well.
        bos, eos: the tokens that begin and that end a text, for the checkpoints.
        sample: called after each evaluation, with the model.
    """

    def __init__(
        self,
        run: Run,
        resolved: Job,
        eval_batches: int,
        eval_train: bool = False,
        bos: tuple[int, ...] = (),
        eos: tuple[int, ...] = (),
        sample: Callable[[ParallelModel], object] = lambda model: None,
    ):
        self.run, self.resolved, self.eval_batches, self.eval_train = run, resolved, eval_batches, eval_train
        self.has_dropout = has_dropout(resolved.model)
        self.global_batch_size = resolved.global_batch_size
        train = resolved.data.train
        self.tokens = self.global_batch_size * train.seq_length
        self.steps_per_epoch = train.steps_per_epoch(self.global_batch_size)
        tokenizer = resolved.data.tokenizer
        kept = None if tokenizer is None else (tokenizer.file, tokenizer.content)
        chat = None if tokenizer is None else tokenizer.chat
        self.metadata, self.sample = ModelMetadata(train.seq_length, eos, kept, bos=bos, chat=chat), sample

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        coordinate = self.run.layout.dp_coordinate(self.run.rank.rank)
        steps = range(epoch * self.steps_per_epoch + first, (epoch + 1) * self.steps_per_epoch)
        batches: Iterator[Batch] = (
            self.resolved.local_batch(self.resolved.data.train, step, coordinate) for step in steps
        )
        if self.has_dropout:
            batches = map(self._with_keys, batches, count(epoch * self.steps_per_epoch + first))
        for batch in batches if self.run.device.type == "cpu" else fetched_ahead(batches):
            yield batch.to(self.run.device)

    def _with_keys(self, batch: Batch, step: int) -> Batch:
        """With the keys of its samples, which decide what dropout drops, on any mesh."""
        size = self.resolved.local_batch_size
        first_sample = self.run.layout.dp_coordinate(self.run.rank.rank) * size
        return replace(batch, sample_keys=sample_keys(self.run.seed, step, first_sample, size))

    def evaluate(self, model: ParallelModel) -> dict[str, float]:
        """Mean loss ``val_loss`` over the first global batches of the validation text: the same ones every time. In
        bits a byte, ``val_bpb``, where the bytes of the text are known. With `eval_train` also ``train_loss``, of as
        many of the training text. Then a sample, where there is to be one."""
        data = self.resolved.data
        loss = self._loss(model, data.validation)
        bytes_per_token = data.bytes_per_token
        found = {"val_loss": loss} | ({} if not bytes_per_token else {"val_bpb": loss / math.log(2) / bytes_per_token})
        if self.eval_train:
            found["train_loss"] = self._loss(model, data.train)
        self.sample(model)
        return found

    def _loss(self, model: ParallelModel, tokens: Tokens) -> float:
        batches = self.resolved.validation_batches(self.eval_batches, self.run.rank.rank, self.run.device, tokens)
        if tokens.has_padding:  # batches have different numbers of targets
            parts = [self._loss_and_count(model, batch) for batch in batches]
            total, targets = (sum(each[1:], each[0]) for each in zip(*parts, strict=True))
            if not int(targets):
                raise DataError(
                    "no token of the validation batches has a target: use more --eval_batches", on_every_rank=True
                )
            return self.run.global_sum(total) / int(targets)
        losses = [model.evaluate(batch.inputs, batch.targets, batch.count) for batch in batches]
        return self.run.global_sum(sum(losses[1:], losses[0])) / len(losses)

    @staticmethod
    def _loss_and_count(model: ParallelModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of this rank's losses, and the targets of the global batch. A collective."""
        split = {} if batch.document_starts is None else {"document_starts": batch.document_starts}
        loss = model.evaluate(batch.inputs, batch.targets, 1, **split)
        return loss, model.count_targets(batch.targets)
