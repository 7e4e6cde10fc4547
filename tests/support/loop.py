"""The body that trainers have in their loop, on a run of `support.runs.make_run`, with a mistake in it where asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.run import Run
from mmm.trainer.text import TextBatches


def fit(
    run: Run,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    job: Any,
    *,
    batches: Any = None,
    max_norm: float = 0.0,
    skips: bool = False,
    epoch: int | None = None,
    balance_rate: float = 0.01,
    planted: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
    update: Callable[[int], object] | None = None,
) -> None:
    """Train.

    Args:
        batches: None for the job's text. planted: (step, local loss) → what stands for the loss, after the backward.
        update: of a step, in place of the optimizer's.
    """
    run.job = job
    scaler = GradScaler("cpu", enabled=False)
    run.state(model=model, optimizer=optimizer, scaler=scaler)
    batches = TextBatches(run, job, job.data.train, model) if batches is None else batches
    for step in run.steps(batches, job.steps, samples=job.global_batch_size, epoch=epoch):
        with loss_parallel():
            if model.pipeline is None:
                for batch in model.microbatches(step.batch):
                    loss = model.loss(model(batch), batch, step.count)
                    loss.backward()
                    step.log(planted(step.index, loss))
            else:
                step.log(planted(step.index, model.run_schedule(step.batch, step.count)))
        norms = step.check(model, scaler, skips)
        if max_norm:
            step.row["grad_norm"] = model.clip(max_norm, norms)
        if step.updates:
            optimizer.step() if update is None else update(step.index)
        optimizer.zero_grad()
        rate = balance_rate if step.skip is None else balance_rate * (1 - step.skip)
        model.balance_experts(rate, step.due)
