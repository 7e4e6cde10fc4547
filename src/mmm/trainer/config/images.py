"""The flags of where images come from: the group ``data`` of the vision programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmm.data.images.datasets import load_images
from mmm.data.images.image_set import ImageData
from mmm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Where images come from."""

    dataset: Literal["mnist", "fashion_mnist", "cifar10", "digits", "fake", "folder"] = "mnist"
    """mnist, fashion_mnist, cifar10: read, or downloaded once a host. digits: comes with the package. fake: made up,
    the label follows from the image. folder: any folder of images, one subfolder a class."""
    data_dir: Path | None = None
    """Where the files are; only read. Default: a cache of its own."""
    workers: int | None = None
    """Processes that read images ahead. Default: none for images in memory, else up to 4."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers {self.workers}: it must not be negative; 0 reads in the rank itself")

    def load(
        self, image_size: int | None = None, channels: int | None = None, classes: int = 10, seed: int = 0
    ) -> ImageData:
        """The data set asked for; see `mmm.data.images.datasets.load_images`."""
        return load_images(
            self.dataset,
            self.data_dir,
            image_size=image_size,
            channels=channels,
            classes=classes,
            seed=seed,
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
