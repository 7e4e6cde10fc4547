"""Train the MNIST net with the shared loop: what ``mmm.examples.fsdp`` does, with accumulation and clipping.

    launch python3 -m mmm.trainer.fsdp --epochs 2 --accumulate 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mmm.models.cnn import CNN
from mmm.parallel import apply, build_mesh, materialize
from mmm.parallel.plans.cnn import cnn_plan
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.cnn import CNNOptions, settle
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import LoopOptions, parse
from mmm.trainer.report import model_summary, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import step_decay
from mmm.trainer.tasks import ImageTask, same_images


@dataclass(frozen=True, kw_only=True)
class Config(CNNOptions, LoopOptions):
    """The MNIST net on images, its parameters over the ranks as --parallel says; one row an epoch."""

    lr: float = 1e-3


def train(config: Config) -> None:
    rank = whoami()
    setting = settle(config, config, rank)
    config.check_accumulate(setting.batch)
    data = setting.data
    with torch.device("meta"):
        model: nn.Module = CNN(setting.model)
    summary = model_summary(model, torch.zeros(setting.batch, *data.shape, device="meta"))
    if config.summary:
        if rank.is_main:
            print(summary)
        return

    with start_run("fsdp", config, setting.layout) as run:
        same_images(run, data)
        run.describe(**setting.describe())
        run.log.info("model, whole:\n%s", summary)
        mesh = build_mesh(setting.layout, run.device.type, config.timeout)
        model = apply(model, mesh, cnn_plan(), run.precision, data_parallel=config.parallel)
        materialize(model, run.device, config.seed)
        run.log.info("%s, %s\n%s", config.parallel, mesh, sharded_model(model))
        optimizer = make_optimizer(config.optimizer, model.parameters(), setting.lr)
        task = ImageTask(run, data, setting.batch, setting.global_batch, config.workers)
        decay = step_decay(task.steps_per_epoch, setting.gamma)
        run.log.info("%s: %d steps of %d images", data.name, setting.steps, setting.global_batch)
        fit(
            run,
            model,
            optimizer,
            task,
            Fit(
                steps=setting.steps,
                accumulate=config.accumulate,
                max_norm=config.max_norm,
                schedule=decay,
                by_epoch=True,
            ),
        )
        if config.save_model:
            save_model(run, model)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
