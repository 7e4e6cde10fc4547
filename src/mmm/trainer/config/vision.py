"""Flags that the vision programs share, and what the two CNN programs decide before their ranks meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from mmm.data.images.datasets import load_images
from mmm.data.images.image_set import ImageData
from mmm.errors import ConfigError
from mmm.layout import batch_sizes
from mmm.models.cnn import CNN, CNNConfig
from mmm.parallel.plans.cnn import check_cnn, cnn_plan
from mmm.runtime.ranks import Rank, whoami
from mmm.trainer.config.layout import DataParallelOptions
from mmm.trainer.config.options import Unused
from mmm.trainer.config.resolve import Resolved
from mmm.trainer.config.resolve_plan import ResolvedPlan, resolve_plan


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Flags of where images come from."""

    dataset: Literal["mnist", "fashion_mnist", "cifar10", "digits", "fake", "folder"] = "mnist"
    """mnist, fashion_mnist, cifar10: read, or downloaded once a host. digits: comes with the package. fake: made up,
    the label follows from the image. folder: any folder of images, one subfolder a class."""
    data_dir: Path | None = None
    """Where the files are; only read. Default: a cache of its own."""
    workers: int | None = None
    """Processes that read images ahead. Default: none for images in memory, else up to 4."""

    def load_images(
        self, rank: Rank, image_size: int | None = None, channels: int | None = None, classes: int = 10, seed: int = 0
    ) -> ImageData:
        """The data set asked for; see `mmm.data.images.datasets.load_images`."""
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers {self.workers}: it must not be negative; 0 reads in the rank itself")
        return load_images(
            self.dataset,
            self.data_dir,
            image_size=image_size,
            channels=channels,
            classes=classes,
            seed=seed,
            ranks=rank,
        )


def check_images(data: ImageData, global_batch: int, dp: int) -> int:
    """Steps of an epoch.

    Args:
        dp: coordinates that share the global batch.

    Raises:
        ConfigError: there are fewer images than one global batch.
    """
    images = data.train.samples
    if images < global_batch:
        most = images // dp * dp
        fix = f"--global_batch_size {most}, or less" if most else f"{images} data-parallel ranks, or fewer"
        raise ConfigError(f"{data.name} has {images} images, fewer than a global batch of {global_batch}: use {fix}")
    return images // global_batch


@dataclass(frozen=True)
class Defaults:
    """How long and how fast to train on a data set. ``global_batch`` None: ``batch`` for every rank."""

    epochs: int
    batch: int
    gamma: float
    global_batch: int | None = None


DEFAULTS = Defaults(epochs=10, batch=64, gamma=0.7)
SMALL_SET = Defaults(epochs=8, batch=32, gamma=0.85, global_batch=32)  # digits: 1,437 images are 44 steps an epoch


@dataclass(frozen=True, kw_only=True)
class CNNOptions(ImageOptions, DataParallelOptions):
    """Flags of the MNIST net."""

    gamma: float | None = None
    """Factor of the learning rate after each epoch. Default: 0.7 (digits 0.85)."""
    scale_lr: Literal["none", "sqrt", "linear"] = "none"
    """Scale the learning rate with the number of data-parallel ranks."""
    dropout: bool = True
    compile: Unused[bool] = False  # the net's plan names nothing to compile
    log_every: Unused[int] = 1  # a row an epoch


@dataclass(frozen=True, kw_only=True)
class ResolvedCNN(ResolvedPlan):
    """What a run of the net needs.

    Attributes:
        lr: as scaled. gamma: its factor after each epoch.
    """

    lr: float
    gamma: float

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"scaled_lr": self.lr, "gamma": self.gamma}


def resolve(options: CNNOptions) -> ResolvedCNN:
    """Find the images, and decide on layout, model, batch, steps and learning rate; needs no process group.

    Raises:
        UserError: anything that does not fit.
    """
    options.check()
    rank = whoami()
    layout = options.layout(rank.world_size)
    if options.gamma is not None and not 0 < options.gamma <= 1:
        raise ConfigError(f"--gamma {options.gamma}: it must be above 0, and at most 1")
    data = options.load_images(rank, seed=options.seed)
    defaults = SMALL_SET if data.name == "digits" else DEFAULTS
    default = max(defaults.global_batch // layout.dp, 1) if defaults.global_batch else defaults.batch
    local_batch_size, global_batch_size = batch_sizes(options.batch_size, options.global_batch_size, layout.dp, default)
    channels, size, _ = data.shape
    sizes = CNNConfig(channels=channels, image_size=size, classes=len(data.classes))
    if not options.dropout or options.break_ is not None:  # one device, for comparison, has none
        sizes = sizes.without_dropout()
    check_cnn(sizes, layout)
    with torch.device("meta"):
        model, sample = CNN(sizes), torch.zeros(local_batch_size, *data.shape)
    limits = options if options.epochs or options.max_iters else replace(options, epochs=defaults.epochs)
    steps = limits.steps(check_images(data, global_batch_size, layout.dp))
    own = Resolved(options=options, layout=layout, sizes=sizes, model=model, sample=sample, data=data, steps=steps)
    resolved = resolve_plan(own, cnn_plan())
    factor = {"none": 1.0, "sqrt": layout.dp**0.5, "linear": float(layout.dp)}[options.scale_lr]
    gamma = defaults.gamma if options.gamma is None else options.gamma
    return ResolvedCNN(**vars(resolved), lr=options.lr * factor, gamma=gamma)
