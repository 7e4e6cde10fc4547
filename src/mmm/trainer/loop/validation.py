"""The samples that a language model is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator

from mmm.data import Batch
from mmm.trainer.config.resolve import Resolved
from mmm.trainer.run.core import Run


def validation_batches(run: Run, resolved: Resolved, batches: int) -> Iterator[Batch]:
    """This rank's samples of the first global batches of the validation text, on the run's device: the same on every
    mesh, every time. Where the text has fewer, all of them."""
    validation, coordinate = resolved.data.validation, run.layout.dp_coordinate(run.rank.rank)
    for step in range(min(batches, validation.steps_per_epoch(resolved.global_batch_size))):
        yield resolved.local_batch(validation, step, coordinate).to(run.device)
