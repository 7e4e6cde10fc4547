"""This rank's tokens of each step, and the loss on those held out.

A batch is a function of seed, step, global batch size and the rank's place in the batch, never of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from mmm.data import Batch, Tokens
from mmm.errors import DataError
from mmm.nn.dropout import sample_keys
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.trainer.job import Job


class TextBatches:
    """The batches of a data-parallel coordinate, on the run's device.

    Args:
        model: counts the targets, where some are padding, and says whether it drops anything.
    """

    def __init__(self, run: Run, job: Job, tokens: Tokens, model: ParallelModel) -> None:
        self.run = run
        self.job = job
        self.tokens = tokens
        self.model = model
        self.coordinate = run.layout.dp_coordinate(run.rank.rank)

    def from_step(self, first: int) -> Iterator[Batch]:
        """One batch a step, epoch after epoch, without end."""
        batches = self._on_host(first)
        if self.run.device.type != "cpu":
            batches = fetched_ahead(batches)
        return map(self._counted, batches)

    def first(self, count: int) -> Iterator[Batch]:
        """The first batches in the order of the text: the same ones every time. Where it has fewer, all of them."""
        run = self.run
        return map(self._counted, self.job.validation_batches(count, run.rank.rank, run.device, self.tokens))

    def _on_host(self, first: int) -> Iterator[Batch]:
        size = self.job.local_batch_size
        step = first
        while True:
            batch = self.job.local_batch(self.tokens, step, self.coordinate)
            if self.model.has_dropout:
                # The keys of its samples decide what dropout drops, on any mesh.
                keys = sample_keys(self.run.seed, step, self.coordinate * size, size)
                batch = replace(batch, sample_keys=keys)
            yield batch
            step += 1

    def _counted(self, batch: Batch) -> Batch:
        """On the device, with the targets of the global batch counted where some are padding. A collective."""
        batch = batch.to(self.run.device)
        if not batch.has_padding:
            return batch
        return replace(batch, count=self.model.count_targets(batch.targets))


def fetched_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each fetched by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while True:
            batch = following.result()
            if batch is None:
                return
            following = thread.submit(next, batches, None)
            yield batch


def validate(run: Run, model: ParallelModel, job: Job, batches: int, eval_train: bool = False) -> dict[str, float]:
    """Evaluate a model on the first global batches of the validation text. A collective.

    Args:
        batches: number of global batches.
        eval_train: evaluate on as many of the training text as well.

    Returns:
        The mean loss ``val_loss``; in bits per byte ``val_bpb``, where the bytes of the text are known; and
        ``train_loss``.
    """
    data = job.data
    with run.evaluating(model):
        loss = _text_loss(run, model, TextBatches(run, job, data.validation, model).first(batches))
        numbers = {"val_loss": loss}
        if data.bytes_per_token:
            numbers["val_bpb"] = loss / math.log(2) / data.bytes_per_token
        if eval_train:
            numbers["train_loss"] = _text_loss(run, model, TextBatches(run, job, data.train, model).first(batches))
    return numbers


def _text_loss(run: Run, model: ParallelModel, batches: Iterable[Batch]) -> float:
    """The mean over all targets of some global batches."""
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    for batch in batches:
        if isinstance(batch.count, Tensor):  # batches have different numbers of targets
            losses.append(model.evaluate(batch, 1))
            counts.append(batch.count)
        else:
            losses.append(model.evaluate(batch))
    if not counts:
        return run.mean_loss(losses)
    targets = int(sum(counts[1:], counts[0]))
    if not targets:
        raise DataError("no token of the validation batches has a target: use more --eval_batches", on_every_rank=True)
    return run.global_sum(sum(losses[1:], losses[0])) / targets
