"""Train a Vision Transformer: FSDP, HSDP, DDP or ZeRO over dp, tensor parallel over tp, a pipeline over pp.

    launch python3 -m mmm.trainer.vit --max_iters 10
    launch -n 4 python3 -m mmm.trainer.vit --max_iters 10 --pp 2 --tp 2

Without --preset: large where there is an accelerator, debug where there is none, and the log says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError
from mmm.layout import batch_sizes
from mmm.models.definition import check_sizes
from mmm.models.vit.definition import MODEL
from mmm.models.vit.model import PRESETS, ViTConfig
from mmm.optim.grad_scaler import GradScaler
from mmm.run.run import start_run
from mmm.run.save_model import save_model
from mmm.run.sharded import shard
from mmm.run.standard import trainer_hooks
from mmm.run.tables import print_on_rank0
from mmm.runtime.device import choose_device
from mmm.runtime.ranks import whoami
from mmm.trainer.config.command_line import parse, run_main
from mmm.trainer.config.images import ImageOptions, check_images
from mmm.trainer.config.layout import LayoutOptions, techniques_of
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.resolve_plan import with_plan
from mmm.trainer.config.run import EvaluationOptions
from mmm.trainer.config.scaled_lr import with_scaled_lr
from mmm.trainer.config.training import (
    RecomputeOptions,
    ScheduledOptions,
    TrainerCheckpoint,
    TrainerRun,
    check_resume,
)
from mmm.trainer.images import ImageBatches, evaluate
from mmm.trainer.job import Job
from mmm.trainer.rate import LearningRate, optimizer_text, schedule_of


@dataclass(frozen=True, kw_only=True)
class ViTOptions:
    """The model: a preset, and what differs from it."""

    preset: Literal["auto", "debug", "tiny", "small", "base", "large"] = "auto"
    """auto: large where there is an accelerator, else debug. The flags below change single sizes."""
    image_size: int | None = None
    patch_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    dim: int | None = None
    n_layers: int | None = None
    n_heads: int | None = None
    attention: Literal["sdpa", "native"] = "sdpa"
    """sdpa: PyTorch's fused kernels. native: the math, step by step."""

    def sizes(self, accelerator: bool) -> tuple[ViTConfig, tuple[str, ...]]:
        """The model asked for, but for what the data decide; and notes of why it is that one, where no flag says."""
        preset: str = self.preset
        notes: tuple[str, ...] = ()
        if preset == "auto":
            preset = "large" if accelerator else "debug"
            why = "there is an accelerator" if accelerator else "no accelerator here; --preset large asks for large"
            notes = (f"preset {preset}: {why}",)
        names = ("image_size", "patch_size", "channels", "classes", "dim", "n_layers", "n_heads")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(PRESETS[preset], attention=self.attention, **given), notes


@dataclass(frozen=True, kw_only=True)
class Config:
    """A Vision Transformer on images. The ranks that --pp and --tpsize leave are data parallel."""

    model: ViTOptions = ViTOptions()
    data: ImageOptions = ImageOptions(dataset="fake")
    layout: LayoutOptions = LayoutOptions()
    optimizer: ScheduledOptions = ScheduledOptions(lr=1e-3, max_norm=1.0, warmup=10)
    memory: RecomputeOptions = RecomputeOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    checkpoint: TrainerCheckpoint = TrainerCheckpoint()
    profile: ProfileOptions = ProfileOptions()
    run: TrainerRun = TrainerRun()

    def check(self) -> None:
        """Rules that span groups. Raises ConfigError for the first that is broken."""
        check_resume(self.checkpoint, self.run)


def resolve(config: Config) -> Job:
    """Find the images, and decide on layout, model, batch and steps; needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    rank = whoami()
    layout, device = config.layout.fit(rank.world_size), choose_device(config.run.device, rank)
    sizes, notes = config.model.sizes(device.type != "cpu")
    check_sizes(sizes, layout)
    default_batch_size = 16 if device.type == "cpu" else 64
    local_batch_size, global_batch_size = batch_sizes(
        config.run.batch_size, config.run.global_batch_size, layout.dp, default_batch_size
    )
    data, steps = None, 0
    if not config.run.summary:
        data = config.data.load(sizes.image_size, sizes.channels, sizes.classes, config.run.seed)
        if config.model.classes not in (None, len(data.classes)):
            raise ConfigError(f"--classes {config.model.classes}, but {data.name} has {len(data.classes)} classes")
        sizes = replace(sizes, classes=len(data.classes))
        steps = config.run.steps(check_images(data, global_batch_size, layout.dp))
    model, sample = MODEL.on_meta(sizes, local_batch_size)
    spec = Job(
        layout=layout,
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=steps,
        techniques=techniques_of(config.layout, config.memory),
        optimizer=config.optimizer.optimizer,
        notes=notes,
    )
    spec = with_scaled_lr(spec, config.optimizer, default_batch_size)
    return with_plan(spec, MODEL.plan(sizes), config.run.dtype, sizes.patches)


def train(config: Config) -> None:
    job = resolve(config)  # everything here is checked before any rank talks to another
    if config.run.summary:
        print_on_rank0(job.summary())
        return

    hooks = trainer_hooks(config.checkpoint, config.profile)
    with start_run("vit", config, job, hooks, runs_on_mps=True) as run:
        batches = ImageBatches(run, job, config.data.workers)
        model = shard(run, job)  # this rank's part of the model, with its weights
        optimizer = config.optimizer.make(model.parameters(), job.lr)
        rate = LearningRate(optimizer, schedule_of(run, job.steps, config.optimizer))
        scaler = GradScaler(run.device.type, enabled=run.precision.name == "fp16")
        images = job.data.train.samples
        run.log.info("%s, %d images: %d steps of %d", job.data.name, images, job.steps, job.global_batch_size)
        run.log.info("optimizer: %s", optimizer_text(optimizer))
        run.state(model=model, optimizer=optimizer, scaler=scaler)  # where the run goes on, they are loaded here
        for step in run.steps(
            batches, job.steps, samples=job.global_batch_size, eval_every=config.evaluation.eval_every
        ):
            rate.set(step.number)
            with loss_parallel():
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
                step.row["grad_norm"] = model.clip(config.optimizer.max_norm, norms)
            if step.skip is None or not step.skip.item():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step.evaluates:
                evaluated = evaluate(run, model, batches)
                step.row |= evaluated
                if step.last:
                    accuracy = evaluated["test_acc"]
                    run.log.info("test accuracy %.2f %% of %d images", accuracy, job.data.test.samples)
        if config.checkpoint.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
