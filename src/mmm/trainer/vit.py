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
from mmm.layout import batch_sizes
from mmm.models.vit import PRESETS, SDPA_BACKENDS, ViT, ViTConfig
from mmm.parallel.plans.vit import check_vit, vit_plan
from mmm.runtime.device import choose_device, choose_precision
from mmm.runtime.ranks import whoami
from mmm.runtime.sdpa import check_sdpa
from mmm.trainer.config.flags import run_main
from mmm.trainer.config.layout import LayoutOptions
from mmm.trainer.config.loop_options import TrainingOptions
from mmm.trainer.config.options import Unused, parse
from mmm.trainer.config.resolve import Resolved
from mmm.trainer.config.resolve_plan import ResolvedPlan, resolve_plan
from mmm.trainer.config.vision import ImageOptions, check_images
from mmm.trainer.loop.fit import Fit, fit
from mmm.trainer.loop.image_task import ImageTask
from mmm.trainer.loop.save import save_model
from mmm.trainer.optim.optimizer import make_optimizer
from mmm.trainer.optim.schedule import schedule_of
from mmm.trainer.run.core import start_run
from mmm.trainer.run.parallelize import parallelize
from mmm.trainer.run.standard import standard_hooks
from mmm.trainer.run.tables import print_once


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
    """sdpa: PyTorch's fused kernels. native: the math, step by step."""
    sdpa_backend: Literal["auto", "math", "flash", "efficient", "cudnn"] = "auto"
    tile: int = 1
    """Tiles of the patches that each MLP is computed in, and recomputed in backward: 1 / tile of its activations."""
    ep: Unused[int] = 1
    cp: Unused[int] = 1  # its sequence is not sharded
    cp_style: Unused[None] = None
    lr: float = 1e-3
    max_norm: float = 1.0
    warmup: int = 10

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
        return replace(PRESETS[preset], attention=self.attention, sdpa_backend=self.sdpa_backend, **given), notes


def resolve(config: Config) -> ResolvedPlan:
    """Find the images, and decide on layout, model, batch and steps; needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    config.check()
    rank = whoami()
    layout, device = config.layout(rank.world_size), choose_device(config.device, rank)
    sizes, notes = config.sizes(device.type != "cpu")
    check_vit(sizes, layout)
    local_batch_size, global_batch_size = batch_sizes(
        config.batch_size, config.global_batch_size, layout.dp, 16 if device.type == "cpu" else 64
    )
    data, steps = None, 0
    if not config.summary:
        compute = choose_precision(config.dtype, device).compute
        check_sdpa(sizes.sdpa_backend, SDPA_BACKENDS, device, compute, (sizes.patches, sizes.head_dim))
        data = config.load_images(rank, sizes.image_size, sizes.channels, sizes.classes, config.seed)
        if config.classes not in (None, len(data.classes)):
            raise ConfigError(f"--classes {config.classes}, but {data.name} has {len(data.classes)} classes")
        sizes = replace(sizes, classes=len(data.classes))
        steps = config.steps(check_images(data, global_batch_size, layout.dp))
    with torch.device("meta"):
        model = ViT(sizes)
        sample = torch.zeros(local_batch_size, sizes.channels, sizes.image_size, sizes.image_size)
    own = Resolved(
        options=config, layout=layout, sizes=sizes, model=model, sample=sample, data=data, steps=steps, notes=notes
    )
    return resolve_plan(own, vit_plan(), sizes.patches)


def train(config: Config) -> None:
    resolved = resolve(config)  # everything here is checked before any rank talks to another
    if config.summary:
        print_once(resolved.summary())
        return

    with start_run("vit", config, resolved, standard_hooks()) as run:
        model, data, steps = parallelize(run, resolved), resolved.data, resolved.steps
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr, config.weight_decay, config.decayed)
        task = ImageTask(run, resolved, config.workers)
        images = data.train.samples
        run.log.info("%s, %d images: %d steps of %d", data.name, images, steps, resolved.global_batch_size)
        schedule = schedule_of(run, steps, config)
        options = Fit(
            steps=steps,
            max_norm=config.max_norm,
            schedule=schedule,
            eval_every=config.eval_every,
            skip=config.on_nan == "skip",
        )
        evaluated = fit(run, model, optimizer, task, options)
        run.log.info("test accuracy %.2f %% of %d images", evaluated["test_acc"], data.test.samples)
        if config.save_model:
            save_model(run, model)


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
