"""This rank's tokens of each step, and the loss on held-out text.

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
        run: the run.
        job: the job.
        tokens: the text.
        model: counts the targets if some are padding, and says whether it drops anything.
    """

    def __init__(self, run: Run, job: Job, tokens: Tokens, model: ParallelModel) -> None:
        self.run = run
        self.job = job
        self.tokens = tokens
        self.model = model
        self.coordinate = run.layout.dp_coordinate(run.rank.rank)

    def from_step(self, first: int) -> Iterator[Batch]:
        """The batches of the steps, epoch after epoch, without end."""
        batches = self._on_host(first)
        # While a device computes, the host has time to fetch.
        if self.run.device.type != "cpu":
            batches = fetched_ahead(batches)
        return map(self._counted, batches)

    def first(self, count: int) -> Iterator[Batch]:
        """The first batches in the order of the text: the same ones every time. If it has fewer, all of them."""
        run = self.run
        batches = self.job.validation_batches(count, run.rank.rank, self.tokens)
        return map(self._counted, batches)

    def _on_host(self, first: int) -> Iterator[Batch]:
        size = self.job.local_batch_size
        step = first
        while True:
            batch = self.job.local_batch(self.tokens, step, self.coordinate)
            if self.model.has_dropout:
                # Each sample has a key, which decides what dropout drops of it, on any mesh.
                keys = sample_keys(self.run.seed, step, self.coordinate * size, size)
                batch = replace(batch, sample_keys=keys)
            yield batch
            step += 1

    def _counted(self, batch: Batch) -> Batch:
        """The batch on the device, with the number of targets in the global batch. A collective if some are padding."""
        batch = batch.to(self.run.device)
        if not batch.has_padding:
            return batch
        return replace(batch, count=self.model.count_targets(batch.targets))


def fetched_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches. A thread fetches each while the one before it is in use."""
    with ThreadPoolExecutor(1) as thread:
        # None: there is no further batch.
        following = thread.submit(next, batches, None)
        while True:
            batch = following.result()
            if batch is None:
                return
            following = thread.submit(next, batches, None)
            yield batch


def evaluate(
    run: Run,
    model: ParallelModel,
    job: Job,
    batches: int,
    eval_train: bool = False,
) -> dict[str, float]:
    """Evaluate a model on the first global batches of the validation text. A collective.

    Args:
        run: the run.
        model: the model.
        job: the job, with the text.
        batches: number of global batches.
        eval_train: evaluate on as many of the training text as well.

    Returns:
        The mean loss ``val_loss``; in bits per byte ``val_bpb``, if the number of bytes of the text is known; and
        ``train_loss``.
    """
    data = job.data
    with run.evaluating(model):
        held_out = TextBatches(run, job, data.validation, model)
        loss = _text_loss(run, model, held_out.first(batches))
        values = {"val_loss": loss}
        if data.bytes_per_token:
            # The loss is in nats for each token.
            values["val_bpb"] = loss / math.log(2) / data.bytes_per_token
        if eval_train:
            trained_on = TextBatches(run, job, data.train, model)
            values["train_loss"] = _text_loss(run, model, trained_on.first(batches))
    return values


def _text_loss(run: Run, model: ParallelModel, batches: Iterable[Batch]) -> float:
    """The mean loss over all targets of some global batches. A collective."""
    losses: list[Tensor] = []
    targets: int | Tensor = 0
    # Batches have different numbers of targets: the losses are summed, and divided at the end.
    for batch in batches:
        losses.append(model.evaluate(batch, 1))
        targets = targets + batch.count
    # On a device until now, so that the host does not wait for each batch.
    count = int(targets)
    if not count:
        raise DataError("no token of the validation batches has a target: use more --eval_batches", on_every_rank=True)
    return run.global_sum(sum(losses[1:], losses[0])) / count
