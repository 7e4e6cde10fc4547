"""Train the MNIST net with the shared loop: what ``mmm.examples.fsdp`` does, and also over pp and tp.

    launch python3 -m mmm.trainer.cnn --epochs 2 --microbatches 2
    launch -n 4 python3 -m mmm.trainer.cnn --epochs 2 --pp 2

10 epochs unless told otherwise (digits: 8), one row each.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmm.models.cnn.plan import cnn_plan
from mmm.runtime.ranks import whoami
from mmm.trainer.config.cnn import CNNOptions, resolve_cnn
from mmm.trainer.config.command_line import parse, run_main
from mmm.trainer.config.images import ImageOptions
from mmm.trainer.config.layout import LayoutOptions, techniques_of
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.resolve_plan import with_plan
from mmm.trainer.config.training import ClippedOptions, EpochRun, TrainerCheckpoint, check_resume
from mmm.trainer.job import Job
from mmm.trainer.loop.fit import FitConfig, fit
from mmm.trainer.loop.image_task import ImageTask
from mmm.trainer.loop.save import save_model
from mmm.trainer.loop.schedule import step_decay
from mmm.trainer.run.core import start_run
from mmm.trainer.run.parallel_model import build_parallel_model
from mmm.trainer.run.standard import standard_hooks
from mmm.trainer.run.tables import print_on_rank0


@dataclass(frozen=True, kw_only=True)
class Config:
    """The MNIST net on images; one row an epoch. The ranks that --pp and --tpsize leave are data parallel."""

    model: CNNOptions = CNNOptions()
    data: ImageOptions = ImageOptions()
    layout: LayoutOptions = LayoutOptions()
    optimizer: ClippedOptions = ClippedOptions(lr=1e-3)
    checkpoint: TrainerCheckpoint = TrainerCheckpoint()
    profile: ProfileOptions = ProfileOptions()
    run: EpochRun = EpochRun()

    def check(self) -> None:
        """Rules that span groups. Raises ConfigError for the first that is broken."""
        check_resume(self.checkpoint, self.run)


def resolve(config: Config) -> Job:
    """`resolve_cnn`, on the layout that the flags ask for, and how the package parallelizes the net."""
    layout, techniques = config.layout.fit(whoami().world_size), techniques_of(config.layout)
    job = resolve_cnn(config.model, config.data, config.run, layout, techniques, config.optimizer)
    return with_plan(job, cnn_plan(), config.run.dtype)


def train(config: Config) -> None:
    spec = resolve(config)  # everything here is checked before any rank talks to another
    if config.run.summary:
        print_on_rank0(spec.summary())
        return

    hooks = standard_hooks(config.checkpoint, config.profile)
    # "fsdp" is what the program was once called: its checkpoints, which later ones go on from, have this name.
    with start_run("fsdp", config, spec, hooks, runs_on_mps=True) as run:
        model = build_parallel_model(run, spec)
        optimizer = config.optimizer.make(model.parameters(), spec.lr)
        task = ImageTask(run, spec, config.data.workers)
        run.log.info("%s: %d steps of %d images", spec.data.name, spec.steps, spec.global_batch_size)
        fit_config = FitConfig(
            steps=spec.steps,
            max_norm=config.optimizer.max_norm,
            schedule=step_decay(task.steps_per_epoch, spec.gamma),
            by_epoch=True,
            skip=config.optimizer.on_nan == "skip",
            checkpoint=config.checkpoint,
            profile=config.profile,
        )
        fit(run, model, optimizer, task, fit_config)
        if config.checkpoint.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
