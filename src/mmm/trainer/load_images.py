"""The images that flags ask for, and what programs that train the MNIST net decide before their ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmm.data.images.datasets import load_images as load_set
from mmm.data.images.image_set import ImageData
from mmm.errors import ConfigError
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.cnn.definition import MODEL
from mmm.models.cnn.model import CNNConfig
from mmm.models.definition import check_sizes
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan
from mmm.trainer.config import Images
from mmm.trainer.job import Job


@dataclass(frozen=True)
class Defaults:
    """How long and how fast to train on a data set.

    Attributes:
        epochs: number of epochs.
        batch: samples per step on each data-parallel coordinate.
        gamma: factor of the learning rate after each epoch.
        global_batch: samples per step over all ranks. None: `batch` on each coordinate.
    """

    epochs: int
    batch: int
    gamma: float
    global_batch: int | None = None


DEFAULTS = Defaults(epochs=10, batch=64, gamma=0.7)
# For digits: 1,437 images are 44 steps an epoch.
SMALL_SET = Defaults(epochs=8, batch=32, gamma=0.85, global_batch=32)


def load_images(
    flags: Images,
    image_size: int | None = None,
    channels: int | None = None,
    classes: int = 10,
    seed: int = 0,
) -> ImageData:
    """The data set that the flags ask for; see `mmm.data.images.datasets.load_images`."""
    return load_set(
        flags.dataset,
        flags.data_dir,
        image_size=image_size,
        channels=channels,
        classes=classes,
        seed=seed,
    )


def check_images(data: ImageData, global_batch: int, dp: int) -> int:
    """Number of steps in an epoch.

    Args:
        data: the images.
        global_batch: samples of a step, over all ranks.
        dp: number of data-parallel coordinates that share the global batch.

    Raises:
        ConfigError: there are fewer images than one global batch.
    """
    n_images = data.train.samples
    if n_images < global_batch:
        # The largest global batch that divides over dp.
        largest = n_images // dp * dp
        fix = f"{n_images} data-parallel ranks, or fewer"
        if largest:
            fix = f"--global_batch_size {largest}, or less"
        raise ConfigError(f"{data.name} has {n_images} images, fewer than a global batch of {global_batch}: use {fix}")
    return n_images // global_batch


def cnn_job(config: Any, layout: Layout, techniques: Techniques, plan: Plan | None = None) -> Job:
    """Model, batch, steps and learning rate of the MNIST net on images. Needs no process group.

    Args:
        config: a program's flags, with the groups model, data, optimizer, duration and run.
        layout: the layout, fitted to the number of ranks.
        techniques: how the net is parallelized on it.
        plan: how the package shards it. None if the program does.

    Raises:
        UserError: anything that does not fit.
    """
    run = config.run
    data = load_images(config.data, seed=run.seed)
    defaults = SMALL_SET if data.name == "digits" else DEFAULTS
    # Per data-parallel coordinate.
    default_batch = defaults.batch
    if defaults.global_batch:
        default_batch = max(defaults.global_batch // layout.dp, 1)
    batch, global_batch = batch_sizes(run.batch_size, run.global_batch_size, layout.dp, default_batch)
    # (channels, height, width); images are square.
    channels, size, _ = data.shape
    sizes = CNNConfig(channels=channels, image_size=size, classes=len(data.classes))
    if not config.model.dropout:
        sizes = sizes.without_dropout()
    check_sizes(sizes, layout)
    model, sample = MODEL.on_meta(sizes, batch)
    steps_per_epoch = check_images(data, global_batch, layout.dp)
    partition = None
    if plan is not None:
        partition = partition_model(model, plan, layout, techniques, sample, run.dtype)
    lr, notes = config.optimizer.scaled(global_batch, defaults.global_batch or defaults.batch)
    return Job(
        layout=layout,
        techniques=techniques,
        sizes=sizes,
        model=model,
        sample=sample,
        plan=plan,
        partition=partition,
        data=data,
        steps=config.duration.steps(steps_per_epoch, defaults.epochs * steps_per_epoch),
        optimizer=config.optimizer.optimizer,
        lr=lr,
        gamma=defaults.gamma if config.optimizer.gamma is None else config.optimizer.gamma,
        notes=notes,
    )
