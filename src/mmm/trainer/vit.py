"""Train a Vision Transformer: FSDP, HSDP, DDP or ZeRO over dp, tensor parallel over tp, a pipeline over pp.

    launch python3 -m mmm.trainer.vit --max_iters 10
    launch -n 4 python3 -m mmm.trainer.vit --max_iters 10 --pp 2 --tp 2

Without --preset: large where there is an accelerator, debug where there is none, and the log says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from mmm.errors import ConfigError
from mmm.models.vit import PRESETS, SDPA_BACKENDS, ViT, ViTConfig
from mmm.parallel import batch_sizes
from mmm.parallel.memory.tiling import check_tiling
from mmm.parallel.partition import partition_model
from mmm.parallel.plans.vit import check_vit, vit_plan
from mmm.runtime.device import choose_device, choose_precision
from mmm.runtime.ranks import whoami
from mmm.runtime.sdpa import check_sdpa
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.layout import LayoutOptions
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import TrainingOptions, Unused, parse
from mmm.trainer.parallelize import parallelize
from mmm.trainer.report import model_summary, print_once
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import fitting_warmup, warmup_cosine
from mmm.trainer.tasks import ImageTask
from mmm.trainer.vision import ImageOptions, check_images


@dataclass(frozen=True, kw_only=True)
class Config(ImageOptions, LayoutOptions, TrainingOptions):
    """A Vision Transformer on images. The ranks that --pp and --tpsize leave are data parallel."""

    dataset: Literal["mnist", "fashion_mnist", "cifar10", "digits", "fake", "folder"] = "fake"
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
    """sdpa: PyTorch's fused kernels. native: written out."""
    sdpa_backend: Literal["auto", "math", "flash", "efficient", "cudnn"] = "auto"
    tile: int = 1
    """Tiles of the patches that each MLP is worked out in, once more in backward: 1 / tile of its activations."""
    ep: Unused[int] = 1
    cp: Unused[int] = 1  # its sequence is not cut
    cp_style: Unused[None] = None
    lr: float = 1e-3
    max_norm: float = 1.0
    warmup: int = 10

    def sizes(self, preset: str) -> ViTConfig:
        """The model asked for, but for what the data decide (`for_data`)."""
        names = ("image_size", "patch_size", "channels", "dim", "n_layers", "n_heads")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(PRESETS[preset], attention=self.attention, sdpa_backend=self.sdpa_backend, **given)


def train(config: Config) -> None:
    config.check()
    rank, plan, techniques = whoami(), vit_plan(), config.techniques(config.compile, tile=config.tile)
    layout = config.layout(rank.world_size)
    device = choose_device(config.device, rank)
    accelerator = device.type != "cpu"
    preset = config.preset if config.preset != "auto" else ("large" if accelerator else "debug")
    sizes = config.sizes(preset)
    check_vit(sizes, layout)
    if not 1 <= config.tile <= sizes.patches:
        raise ConfigError(
            f"--tile {config.tile}: it must be at least 1, and at most the {sizes.patches} patches of an image"
        )
    check_tiling(config.tile, config.activation_checkpointing)
    batch, global_batch = batch_sizes(config.batch_size, config.global_batch_size, layout.dp, 64 if accelerator else 16)
    if config.summary:
        data, sizes = None, replace(sizes, classes=config.classes or sizes.classes)
    else:
        check_sdpa(
            sizes.sdpa_backend,
            SDPA_BACKENDS,
            device,
            choose_precision(config.dtype, device).compute,
            (sizes.patches, sizes.head_dim),
        )
        fake_classes = config.classes or sizes.classes
        data = config.load_images(rank, sizes.image_size, sizes.channels, fake_classes, config.seed)
        if config.classes not in (None, len(data.classes)):
            raise ConfigError(f"--classes {config.classes}, but {data.name} has {len(data.classes)} classes")
        sizes = replace(sizes, classes=len(data.classes))
        check_images(data, global_batch, layout.dp)
    with torch.device("meta"):
        model = ViT(sizes)
        sample = torch.zeros(batch, sizes.channels, sizes.image_size, sizes.image_size)
    partition = partition_model(model, plan, layout, techniques, sample, config.dtype)
    summary = model_summary(model, sample)
    if data is None:
        print_once(summary)
        return

    holds = footprint(model, config.optimizer, techniques, partition, layout.pp)
    with start_run("vit", config, layout, data.describe(), holds) as run:
        if config.preset == "auto":
            why = "there is an accelerator" if accelerator else "no accelerator here; --preset large asks for large"
            run.note(f"preset {preset}: {why}")
        run.log.info("model, whole:\n%s", summary)
        parallel = parallelize(run, model, plan, techniques, partition)
        optimizer = make_optimizer(config.optimizer, parallel.parameters(), config.lr)
        task = ImageTask(run, data, batch, global_batch, config.workers)
        steps = config.steps(task.steps_per_epoch)
        run.describe(model=sizes, global_batch_size=global_batch, steps=steps)
        run.log.info("%s, %d images: %d steps of %d", data.name, data.train.samples, steps, global_batch)
        warmup, cut = fitting_warmup(config.warmup, steps)
        if cut:
            run.note(cut)
        schedule = warmup_cosine(steps, warmup)
        evaluated = fit(
            run,
            parallel,
            optimizer,
            task,
            Fit(steps=steps, max_norm=config.max_norm, schedule=schedule, eval_every=config.eval_every),
        )
        run.log.info("test accuracy %.2f %% of %d images", evaluated["test_acc"], data.test.samples)
        if config.save_model:
            save_model(run, parallel)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
