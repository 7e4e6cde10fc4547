"""Train a Vision Transformer: FSDP, HSDP, DDP or ZeRO over dp, tensor parallel over tp.

    launch python3 -m mmm.trainer.vit --max_iters 10

Without --preset: large where there is an accelerator, debug where there is none, and the log says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import tyro
from torch import nn

from mmm.errors import ConfigError
from mmm.models.vit import PRESETS, ViT, ViTConfig
from mmm.parallel import apply, batch_sizes, build_mesh, materialize
from mmm.parallel.plans.vit import check_vit, vit_plan
from mmm.parallel.tile import check_tiles
from mmm.runtime.device import choose_device
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.loop import Fit, fit
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import TrainingOptions, parse
from mmm.trainer.report import model_summary, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.save import save_model
from mmm.trainer.schedule import warmup_cosine
from mmm.trainer.tasks import ImageTask, same_images
from mmm.trainer.vision import DataParallel, ImageOptions, data_parallel_layout


@dataclass(frozen=True, kw_only=True)
class Config(ImageOptions, TrainingOptions):
    """A Vision Transformer on images. The ranks that --tpsize leaves are data parallel."""

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
    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is cut."""
    parallel: DataParallel = "fsdp"
    """How parameters, gradients and optimizer state lie over the data-parallel ranks."""
    replicas: int = 0
    """Copies of the model under hsdp; 0: two."""
    tile: int = 1
    """Tiles of the patches that each MLP is worked out in, once more in backward: 1 / tile of its activations."""
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
    rank = whoami()
    layout = data_parallel_layout(config.parallel, config.tpsize, config.replicas, rank.world_size)
    accelerator = choose_device(config.device, rank).type != "cpu"
    preset = config.preset if config.preset != "auto" else ("large" if accelerator else "debug")
    sizes = config.sizes(preset)
    check_vit(sizes, layout)
    if not 1 <= config.tile <= sizes.patches:
        raise ConfigError(f"--tile {config.tile}: it must be at least 1, and at most the {sizes.patches} patches of an "
                          f"image")  # fmt: skip
    check_tiles(config.tile, config.activation_checkpointing)
    batch, global_batch = batch_sizes(config.batch_size, config.global_batch_size, layout.dp, 64 if accelerator else 16)
    config.check_accumulate(batch)
    if config.summary:
        data, sizes = None, replace(sizes, classes=config.classes or sizes.classes)
    else:
        fake_classes = config.classes or sizes.classes
        data = config.load_images(rank, sizes.image_size, sizes.channels, fake_classes, config.seed)
        if config.classes not in (None, len(data.classes)):
            raise ConfigError(f"--classes {config.classes}, but {data.name} has {len(data.classes)} classes")
        sizes = replace(sizes, classes=len(data.classes))
    with torch.device("meta"):
        model: nn.Module = ViT(sizes)
    shape = (batch, sizes.channels, sizes.image_size, sizes.image_size)
    summary = model_summary(model, torch.zeros(shape, device="meta"))
    if data is None:
        if rank.is_main:
            print(summary)
        return

    with start_run("vit", config, layout) as run:
        if config.preset == "auto":
            why = "there is an accelerator" if accelerator else "no accelerator here; --preset large asks for large"
            run.note(f"preset {preset}: {why}")
        same_images(run, data)
        run.log.info("model, whole:\n%s", summary)
        mesh = build_mesh(layout, run.device.type, config.timeout)
        plan = vit_plan()
        model = apply(
            model,
            mesh,
            plan,
            run.precision,
            data_parallel=config.parallel,
            compile=config.compile,
            checkpointing=config.activation_checkpointing,
            tile=config.tile,
        )
        materialize(model, run.device, config.seed)
        run.log.info("%s\n%s", mesh, sharded_model(model))
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        task = ImageTask(run, data, batch, global_batch, config.workers)
        steps = config.steps(task.steps_per_epoch)
        run.describe(model=sizes, data=data.describe(), global_batch_size=global_batch, steps=steps)
        run.log.info("%s, %d images: %d steps of %d", data.name, data.train.samples, steps, global_batch)
        how = Fit(
            steps=steps,
            accumulate=config.accumulate,
            max_norm=config.max_norm,
            schedule=warmup_cosine(steps, min(config.warmup, steps // 2)),
            eval_every=config.eval_every,
        )
        judged = fit(run, model, optimizer, task, how)
        run.log.info("test accuracy %.2f %% of %d images", judged["test_acc"], data.test.samples)
        if config.save_model:
            save_model(run, model)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
