"""Data parallelism on a small convolutional net: DDP, ZeRO-1, ZeRO-2, FSDP (ZeRO-3), HSDP, by one flag.

    launch python3 -m mmm.examples.fsdp --epochs 2
    launch python3 -m mmm.examples.fsdp --parallel zero2

Every rank has its own samples of each step. What differs is what a rank keeps, of N ranks (each a share of 1/N)::

                parameters    gradients    optimizer state    communication of a step
      ddp         whole         whole          whole          all-reduce
      zero1       whole         whole          1/N            all-reduce, all-gather
      zero2       whole         1/N            1/N            reduce-scatter, all-gather
      fsdp        1/N           1/N            1/N            all-gather twice, reduce-scatter
      hsdp        fsdp within each of R groups of N/R ranks, an all-reduce between the groups

The losses are the same for all of them. 10 epochs unless told otherwise (digits: 8), one row each; every test image
counts once, whatever the number of ranks.
The same job with accumulation and clipping: ``mmm.trainer.fsdp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mmm.data.image_batches import ImageBatch, ImageBatches, evaluation
from mmm.models.cnn import CNN
from mmm.parallel import apply, build_mesh, cross_entropy, local_value, materialize
from mmm.parallel.grad_scaler import GradScaler
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.techniques import Techniques
from mmm.runtime.ranks import whoami
from mmm.runtime.seed import seed_step
from mmm.trainer.cnn import CNNOptions, resolve
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.layout import DataParallelOptions
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import RunOptions, parse
from mmm.trainer.progress import epochs_bar
from mmm.trainer.report import model_summary, sharded_model
from mmm.trainer.run import Run, start_run
from mmm.trainer.save import save_model
from mmm.trainer.tasks import evaluate_images


@dataclass(frozen=True, kw_only=True)
class Config(CNNOptions, DataParallelOptions, RunOptions):
    """The MNIST net on images, its parameters over the ranks as --parallel says."""

    lr: float = 1e-3
    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""


def train(config: Config) -> None:
    resolved = resolve(config, config, config.layout(whoami().world_size), whoami())
    data, layout, batch = resolved.data, resolved.layout, resolved.batch
    with torch.device("meta"):
        model: nn.Module = CNN(resolved.model)
    summary = model_summary(model, resolved.sample)
    if config.summary:
        if whoami().is_main:
            print(summary)
        return

    holds = footprint(model, config.optimizer, Techniques(data_parallel=config.parallel))
    with start_run("fsdp", config, layout, data.describe(), holds) as run:
        run.describe(**resolved.describe())
        run.log.info("model, whole:\n%s", summary)

        mesh = build_mesh(layout, run.device.type, config.timeout)
        model = apply(model, mesh, cnn_plan(), run.precision, data_parallel=config.parallel)
        materialize(model, run.device, config.seed)
        run.log.info("%s, %s\n%s", config.parallel, mesh, sharded_model(model))
        optimizer = make_optimizer(config.optimizer, model.parameters(), resolved.lr)
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")

        sequence = ImageBatches(data.train, resolved.global_batch, config.seed)
        mine = layout.dp_coordinate(run.rank.rank)
        loader = sequence.loader(mine, layout.dp, workers=config.workers)
        test_loader = evaluation(data.test, max(batch, 64), mine, layout.dp, workers=config.workers)
        per_epoch = sequence.steps_per_epoch
        run.log.info("%s: %d steps of %d images", data.name, resolved.steps, resolved.global_batch)
        for first in range(0, resolved.steps, per_epoch):
            steps = range(first, min(first + per_epoch, resolved.steps))
            optimizer.param_groups[0]["lr"] = resolved.lr * resolved.gamma ** (first // per_epoch)
            batches = zip(epochs_bar(steps, per_epoch, run.rank), loader.epoch(first // per_epoch), strict=False)
            share = train_epoch(run, model, optimizer, scaler, batches)
            evaluated = evaluate_images(run, model, test_loader)
            at, row = {"epoch": first // per_epoch + 1}, {"train_loss": share / len(steps)}
            run.row(at, row, samples=len(steps) * resolved.global_batch, more=evaluated)
        if config.save_model:
            save_model(run, model)


def train_epoch(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    batches: Iterator[tuple[int, ImageBatch]],
) -> float:
    """Train on (step, batch) of an epoch; the sum of this rank's shares of the losses."""
    model.train()
    share = 0.0
    run.clock.start()
    for step, batch in batches:
        seed_step(run.options.seed, step, run.layout.dp_coordinate(run.rank.rank))  # for dropout
        part = batch.to(run.device, run.precision.storage)
        run.clock.lap("dtd")
        loss = cross_entropy(model(part.images), part.labels, part.count)
        share += local_value(loss)
        run.clock.lap("dtf")
        scaler.scale(loss).backward()
        run.clock.lap("dtb")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.clock.lap("dto")
    return share


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
