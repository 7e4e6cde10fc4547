"""Steps over the batches of anyone's data loader, whose workers may fail (docs/your-script.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmm.data.workers import read
from mmm.trainer.run.core import Run
from mmm.trainer.run.steps import Step, mean_loss, steps_over


def train_steps(
    run: Run,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    samples: int,
    tokens: int = 0,
    before_row: Callable[[Step], object] = lambda step: None,
) -> Iterator[Step]:
    """`steps_over` batches, one a step. Raises DataError also where a data loader's worker fails."""
    source = read(batches, run.options.timeout, run.note)
    return steps_over(run, source, optimizer, steps, samples=samples, tokens=tokens, before_row=before_row)


def evaluate(run: Run, batches: Iterable[Any], local_loss: Callable[[Any], Tensor]) -> float:
    """`mean_loss` over batches. Raises DataError also where a data loader's worker fails."""
    return mean_loss(run, read(batches, run.options.timeout, run.note), local_loss)
