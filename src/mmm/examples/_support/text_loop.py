"""The steps of an example that trains a Transformer on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.examples._support.mistakes import STEPS, OneDevice, mistake_of
from mmm.examples._support.text_config import TextConfig
from mmm.models.transformer import Transformer
from mmm.trainer.config.spec import TrainingSpec
from mmm.trainer.loop.steps import Step, mean_loss, steps_over, validation_batches
from mmm.trainer.run.core import Run


def text_steps(
    run: Run,
    resolved: TrainingSpec,
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    local_loss: Callable[[Batch], Tensor] | None = None,
    *,
    coordinate: int | None = None,
    at: Mapping[str, int] | None = None,
) -> Iterator[Step]:
    """The steps of a program that trains a Transformer on text.

    Args:
        model: what this rank trains; of a pipeline, its stages.
        local_loss: for validation, where the program has its flags: of the samples of this rank's data-parallel
            coordinate → this rank's part of the loss of a global batch.
        coordinate: whose samples these are. Default: this rank's data-parallel coordinate.
        at: what a row says besides its step, such as ``{"stage": 1}``.
    """
    steps, evaluation = resolved.steps, run.config.evaluation if isinstance(run.config, TextConfig) else None
    global_batch, tokens = resolved.global_batch_size, resolved.data.train
    if coordinate is None:
        coordinate = run.layout.dp_coordinate(run.rank.rank)
    one_device = None
    if mistake_of(run) is not None:
        steps = min(steps, STEPS)
        one_device = _on_one_device(run, resolved, [model] if isinstance(model, nn.Module) else model, optimizer)

    def before_row(step: Step) -> None:
        if local_loss is not None and evaluation is not None and evaluation.is_due(step.number, steps):
            with loss_parallel():
                batches = validation_batches(run, resolved, evaluation.eval_batches)
                step.row["val_loss"] = mean_loss(run, batches, local_loss)
            step.due = True
        if one_device is not None:
            one_device.loss(run.global_sum(step.local_loss))

    if not at:
        run.log.info("%d steps of %d × %d tokens", steps, global_batch, tokens.seq_length, stacklevel=2)
    yield from steps_over(
        run,
        (resolved.local_batch(tokens, number, coordinate).to(run.device) for number in range(steps)),
        optimizer,
        steps,
        samples=global_batch,
        tokens=global_batch * tokens.seq_length,
        at=at,
        before_row=before_row,
        depth=3,
    )
    if one_device is not None:
        one_device.report()


def _on_one_device(
    run: Run, resolved: TrainingSpec, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> OneDevice:
    """The same steps on one device, on full global batches."""
    tokens, size = resolved.data.train, resolved.global_batch_size
    with torch.device("meta"):
        full = Transformer(resolved.sizes)
    return OneDevice(run, full, modules, optimizer, lambda step: tokens.batch(step, size, 0, size).to(run.device))
