"""Train a Vision Transformer: FSDP, HSDP, DDP or ZeRO over dp, tensor parallel over tp, a pipeline over pp.

    launch python3 -m mmm.trainer.vit --max_iters 10
    launch -n 4 python3 -m mmm.trainer.vit --max_iters 10 --pp 2 --tp 2

Without --preset: large where there is an accelerator, debug where there is none, and the log says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mmm.errors import ConfigError
from mmm.layout import batch_sizes
from mmm.models.definition import check_sizes
from mmm.models.vit.definition import MODEL
from mmm.models.vit.model import PRESETS, ViTConfig
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
from mmm.trainer.job import Job
from mmm.trainer.loop.fit import FitConfig, fit
from mmm.trainer.loop.image_task import ImageTask
from mmm.trainer.loop.save import save_model
from mmm.trainer.loop.schedule import schedule_of
from mmm.trainer.run.core import start_run
from mmm.trainer.run.parallel_model import build_parallel_model
from mmm.trainer.run.standard import standard_hooks
from mmm.trainer.run.tables import print_on_rank0


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
    spec = resolve(config)  # everything here is checked before any rank talks to another
    if config.run.summary:
        print_on_rank0(spec.summary())
        return

    with start_run("vit", config, spec, standard_hooks(config.checkpoint, config.profile), runs_on_mps=True) as run:
        model, data, chosen = build_parallel_model(run, spec), spec.data, config.optimizer
        optimizer = chosen.make(model.parameters(), spec.lr)
        task = ImageTask(run, spec, config.data.workers)
        images = data.train.samples
        run.log.info("%s, %d images: %d steps of %d", data.name, images, spec.steps, spec.global_batch_size)
        fit_config = FitConfig(
            steps=spec.steps,
            max_norm=chosen.max_norm,
            schedule=schedule_of(run, spec.steps, chosen),
            evaluation=config.evaluation,
            skip=chosen.on_nan == "skip",
            checkpoint=config.checkpoint,
            profile=config.profile,
        )
        evaluated = fit(run, model, optimizer, task, fit_config)
        run.log.info("test accuracy %.2f %% of %d images", evaluated["test_acc"], data.test.samples)
        if config.checkpoint.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
