"""Train the MNIST net with the shared loop: what ``mmm.examples.fsdp`` does, and also over pp and tp.

    launch python3 -m mmm.trainer.fsdp --epochs 2 --microbatches 2
    launch -n 4 python3 -m mmm.trainer.fsdp --epochs 2 --pp 2

10 epochs unless told otherwise (digits: 8), one row each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mmm.models.cnn import CNN
from mmm.parallel.partition import partition_model
from mmm.parallel.plans.cnn import cnn_plan
from mmm.runtime.ranks import whoami
from mmm.trainer.cnn import CNNOptions, resolve
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import LoopOptions, Unused, parse
from mmm.trainer.parallelize import parallelize
from mmm.trainer.report import model_summary, print_once
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import step_decay
from mmm.trainer.tasks import ImageTask


@dataclass(frozen=True, kw_only=True)
class Config(CNNOptions, LayoutOptions, LoopOptions):
    """The MNIST net on images; one row an epoch. The ranks that --pp and --tpsize leave are data parallel."""

    lr: float = 1e-3
    ep: Unused[int] = 1
    cp: Unused[int] = 1  # an image has no sequence to shard
    cp_style: Unused[None] = None
    activation_checkpointing: Unused[Literal["none", "full", "selective"]] = "none"  # the net's plan names nothing


def train(config: Config) -> None:
    rank, plan, techniques = whoami(), cnn_plan(), config.techniques(config.compile)
    resolved = resolve(config, config, config.layout(rank.world_size), rank)
    with torch.device("meta"):
        model = CNN(resolved.model)
    partition = partition_model(model, plan, resolved.layout, techniques, resolved.sample, config.dtype)
    summary = model_summary(model, resolved.sample)
    if config.summary:
        print_once(summary)
        return

    holds = footprint(model, config.optimizer, techniques, partition, resolved.layout.pp)
    with start_run("fsdp", config, resolved.layout, resolved.data.describe(), holds) as run:
        run.describe(**resolved.describe())
        run.log.info("model, whole:\n%s", summary)
        parallel = parallelize(run, model, plan, techniques, partition)
        optimizer = make_optimizer(config.optimizer, parallel.parameters(), resolved.lr)
        task = ImageTask(run, resolved.data, resolved.batch, resolved.global_batch, config.workers)
        decay = step_decay(task.steps_per_epoch, resolved.gamma)
        run.log.info("%s: %d steps of %d images", resolved.data.name, resolved.steps, resolved.global_batch)
        fit(
            run,
            parallel,
            optimizer,
            task,
            Fit(steps=resolved.steps, max_norm=config.max_norm, schedule=decay, by_epoch=True),
        )
        if config.save_model:
            save_model(run, parallel)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
