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
from mmm.parallel.assemble import divide
from mmm.parallel.plans.cnn import cnn_plan
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.cnn import CNNOptions, settle
from mmm.trainer.fits import footprint
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import LoopOptions, Unused, parse
from mmm.trainer.place import place
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
    cp: Unused[int] = 1  # an image has no sequence to cut
    cp_style: Unused[None] = None
    activation_checkpointing: Unused[Literal["none", "full", "selective"]] = "none"  # the net's plan names nothing


def train(config: Config) -> None:
    rank, plan, how = whoami(), cnn_plan(), config.techniques(config.compile)
    setting = settle(config, config, config.layout(rank.world_size), rank)
    with torch.device("meta"):
        model = CNN(setting.model)
    division = divide(model, plan, setting.layout, how, setting.sample, config.dtype)
    summary = model_summary(model, setting.sample)
    if config.summary:
        print_once(summary)
        return

    holds = footprint(model, config.optimizer, how, division, setting.layout.pp)
    with start_run("fsdp", config, setting.layout, setting.data.describe(), holds) as run:
        run.describe(**setting.describe())
        run.log.info("model, whole:\n%s", summary)
        parallel = place(run, model, plan, how, division)
        optimizer = make_optimizer(config.optimizer, parallel.parameters(), setting.lr)
        task = ImageTask(run, setting.data, setting.batch, setting.global_batch, config.workers)
        decay = step_decay(task.steps_per_epoch, setting.gamma)
        run.log.info("%s: %d steps of %d images", setting.data.name, setting.steps, setting.global_batch)
        fit(
            run,
            parallel,
            optimizer,
            task,
            Fit(steps=setting.steps, max_norm=config.max_norm, schedule=decay, by_epoch=True),
        )
        if config.save_model:
            save_model(run, parallel)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
