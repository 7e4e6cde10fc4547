"""Train the MNIST net with the shared loop: what ``mmm.examples.fsdp`` does, and also over pp and tp.

    launch python3 -m mmm.trainer.cnn --epochs 2 --microbatches 2
    launch -n 4 python3 -m mmm.trainer.cnn --epochs 2 --pp 2

10 epochs unless told otherwise (digits: 8), one row each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmm.trainer.config.flags import run_main
from mmm.trainer.config.layout import LayoutOptions
from mmm.trainer.config.loop_options import LoopOptions
from mmm.trainer.config.options import Unused, parse
from mmm.trainer.config.vision import CNNOptions, resolve
from mmm.trainer.loop.fit import Fit, fit
from mmm.trainer.loop.image_task import ImageTask
from mmm.trainer.loop.save import save_model
from mmm.trainer.optim.optimizer import make_optimizer
from mmm.trainer.optim.schedule import step_decay
from mmm.trainer.run.core import start_run
from mmm.trainer.run.parallelize import parallelize
from mmm.trainer.run.standard import standard_hooks
from mmm.trainer.run.tables import print_once


@dataclass(frozen=True, kw_only=True)
class Config(CNNOptions, LayoutOptions, LoopOptions):
    """The MNIST net on images; one row an epoch. The ranks that --pp and --tpsize leave are data parallel."""

    lr: float = 1e-3
    ep: Unused[int] = 1
    cp: Unused[int] = 1  # an image has no sequence to shard
    cp_style: Unused[None] = None
    activation_checkpointing: Unused[Literal["none", "full", "selective"]] = "none"  # the net's plan names nothing


def train(config: Config) -> None:
    resolved = resolve(config)  # everything here is checked before any rank talks to another
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("fsdp", config, resolved, standard_hooks()) as run:
        model = parallelize(run, resolved)
        optimizer = make_optimizer(config.optimizer, model.parameters(), resolved.lr)
        task = ImageTask(run, resolved, config.workers)
        run.log.info("%s: %d steps of %d images", resolved.data.name, resolved.steps, resolved.global_batch_size)
        decay = step_decay(task.steps_per_epoch, resolved.gamma)
        skip = config.on_nan == "skip"
        options = Fit(steps=resolved.steps, max_norm=config.max_norm, schedule=decay, by_epoch=True, skip=skip)
        fit(run, model, optimizer, task, options)
        if config.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
