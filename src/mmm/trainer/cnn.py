"""Train the MNIST net with the shared loop: what ``mmm.examples.fsdp`` does, and also over pp and tp.

    launch python3 -m mmm.trainer.cnn --epochs 2 --microbatches 2
    launch -n 4 python3 -m mmm.trainer.cnn --epochs 2 --pp 2

10 epochs unless told otherwise (digits: 8), one row each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmm.models.cnn.plan import cnn_plan
from mmm.optim.grad_scaler import GradScaler
from mmm.run.checkpoints import Checkpoints
from mmm.run.command_line import parse, run_main
from mmm.run.folder import Folder
from mmm.run.options import CheckpointFlags, Duration, RunFlags
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.tables import print_on_rank0
from mmm.runtime.ranks import whoami
from mmm.trainer.config import DTYPES, OPTIMIZERS, UNLISTED, Evaluation, ImageModel, Images, MeshFlags, Optimizer
from mmm.trainer.images import ImageBatches, evaluate
from mmm.trainer.job import Job
from mmm.trainer.load_images import cnn_job
from mmm.trainer.rate import LearningRate, optimizer_text, step_decay


@dataclass(frozen=True, kw_only=True)
class Config:
    """The MNIST net on images; one row an epoch. The ranks that --pp and --tp leave are data parallel."""

    model: ImageModel = ImageModel()
    data: Images = Images()
    mesh: MeshFlags = MeshFlags()
    optimizer: Optimizer = Optimizer(lr=1e-3)
    evaluation: Evaluation = Evaluation()
    checkpoint: CheckpointFlags = CheckpointFlags()
    duration: Duration = Duration()
    run: RunFlags = RunFlags(plots=True)

    # The net has one size; its rate falls by --gamma after each epoch; rows and evaluations are those of epochs.
    LEFT_OUT: ClassVar = (
        *("model", "preset", "image_size", "patch_size", "channels", "classes"),
        *("dim", "n_layers", "n_heads", "window", "attention"),
        *("cp", "cp_style", "ulysses", "ep", "loss_chunks", "offload", "activation_checkpointing", "compile", "exact"),
        *("warmup", "lr_schedule", "min_lr", "decay", "betas", "weight_decay", "decayed"),
        *("eval_every", "eval_batches", "eval_train", "prompt", "log_every"),
    )
    UNLISTED: ClassVar = UNLISTED - {"dropout"}
    CHOICES: ClassVar = {"dtype": DTYPES, "optimizer": OPTIMIZERS}


def resolve(config: Config) -> Job:
    """Find the images, and decide on layout, model, batch, steps and learning rate. Needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    layout = config.mesh.fit(whoami().world_size)
    return cnn_job(config, layout, config.mesh.techniques(), cnn_plan())


def train(config: Config) -> None:
    # Everything here is checked before any rank talks to another.
    job = resolve(config)
    if config.model.summary:
        print_on_rank0(job.summary())
        return

    max_norm = config.optimizer.max_norm
    skips = config.optimizer.on_nan == "skip"
    folder = Folder(Checkpoints(config.checkpoint))
    hooks = trainer_hooks(config.evaluation)
    # Checkpoints have this name of the program, and a run resumes only from those of its own name.
    with start_run("fsdp", config, job, folder, hooks, runs_on_mps=True) as run:
        batches = ImageBatches(run, job, config.data.workers)
        # This rank's part of the model, with its weights.
        model = shard(run, job)
        optimizer = config.optimizer.make(model.parameters(), job.lr)
        rate = LearningRate(optimizer, step_decay(batches.steps_per_epoch, job.gamma))
        # Scales the loss of fp16; with any other data type it does nothing.
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        run.log.info("%s: %d steps of %d images", job.data.name, job.steps, job.global_batch_size)
        run.log.info("optimizer: %s", optimizer_text(optimizer))
        # What checkpoints save. A resumed run loads it here.
        run.state(model=model, optimizer=optimizer, scaler=scaler)
        for step in run.steps(
            batches, job.steps, samples=job.global_batch_size, eval_every=0, epoch=batches.steps_per_epoch
        ):
            rate.set(step.index)
            if model.pipeline is None:
                # Gradients are summed over dp in the backward of the last micro-batch.
                for batch in model.microbatches(step.batch):
                    loss = model.loss(model(batch), batch, step.count)
                    step.log(loss)
                    scaler.scale(loss).backward()
            else:
                # The pipeline's schedule makes forwards and backwards, in its order.
                step.log(model.run_schedule(step.batch, step.count))
            scaler.unscale_(optimizer)
            # NaN or inf: the run ends at the next row; with --on_nan skip this step changes nothing.
            norms = step.check(model, scaler, skips)
            if max_norm:
                model.clip(max_norm, norms)
            if step.updates:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step.evaluates:
                step.row |= evaluate(run, model, batches)
        if config.model.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
