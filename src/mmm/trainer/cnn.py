"""Train the MNIST net with the shared loop: what ``mmm.examples.fsdp`` does, and also over pp and tp.

    launch python3 -m mmm.trainer.cnn --epochs 2 --microbatches 2
    launch -n 4 python3 -m mmm.trainer.cnn --epochs 2 --pp 2

10 epochs unless told otherwise (digits: 8), one row each.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmm.models.cnn.plan import cnn_plan
from mmm.optim.grad_scaler import GradScaler
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.tables import print_on_rank0
from mmm.runtime.ranks import whoami
from mmm.trainer.config.cnn import CNNOptions, resolve_cnn
from mmm.trainer.config.command_line import parse, run_main
from mmm.trainer.config.images import ImageOptions
from mmm.trainer.config.layout import LayoutOptions, techniques_of
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.resolve_plan import with_plan
from mmm.trainer.config.training import ClippedOptions, EpochRun, TrainerCheckpoint, check_resume
from mmm.trainer.images import ImageBatches, evaluate
from mmm.trainer.job import Job
from mmm.trainer.rate import LearningRate, optimizer_text, step_decay


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
    job = resolve(config)  # everything here is checked before any rank talks to another
    if config.run.summary:
        print_on_rank0(job.summary())
        return

    hooks = trainer_hooks(config.checkpoint, config.profile)
    # "fsdp" is what the program was once called: its checkpoints, which later ones go on from, have this name.
    with start_run("fsdp", config, job, hooks, runs_on_mps=True) as run:
        batches = ImageBatches(run, job, config.data.workers)
        model = shard(run, job)  # this rank's part of the model, with its weights
        optimizer = config.optimizer.make(model.parameters(), job.lr)
        rate = LearningRate(optimizer, step_decay(batches.steps_per_epoch, job.gamma))
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        run.log.info("%s: %d steps of %d images", job.data.name, job.steps, job.global_batch_size)
        run.log.info("optimizer: %s", optimizer_text(optimizer))
        run.state(model=model, optimizer=optimizer, scaler=scaler)  # where the run goes on, they are loaded here
        for step in run.steps(
            batches, job.steps, samples=job.global_batch_size, eval_every=0, epoch=batches.steps_per_epoch
        ):
            rate.set(step.number)
            if model.pipeline is None:
                for batch in step.microbatches:  # gradients are summed over dp after the last one
                    loss = model.loss(model(batch), batch, step.count)
                    step.log(loss)
                    scaler.scale(loss).backward()
            else:
                step.log(model.run_schedule(step.batch, step.count))  # forwards and backwards, in its order
            scaler.unscale_(optimizer)
            # What is not finite ends the run at the next row, or is skipped now.
            norms = step.check(model, scaler, skips=config.optimizer.on_nan == "skip")
            if config.optimizer.max_norm:
                model.clip(config.optimizer.max_norm, norms)
            if step.skip is None or not step.skip.item():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step.evaluates:
                step.row |= evaluate(run, model, batches)
        if config.checkpoint.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
