"""Flags that the vision programs share: which images, and how the parameters lie over the data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmm.data.datasets import load_images
from mmm.data.images import ImageData
from mmm.errors import ConfigError
from mmm.parallel.data import check_data_parallel
from mmm.parallel.mesh import Layout
from mmm.runtime.ranks import Rank

DataParallel = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


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
        """The data set asked for; see `mmm.data.datasets.load_images`."""
        return load_images(
            self.dataset,
            self.data_dir,
            image_size=image_size,
            channels=channels,
            classes=classes,
            seed=seed,
            ranks=rank,
        )


def data_parallel_layout(kind: str, tp: int, replicas: int, world_size: int) -> Layout:
    """The mesh of a data-parallel technique: HSDP has copies, the others one axis.

    Args:
        replicas: copies of the model under hsdp; 0 for two.

    Raises:
        LayoutError: it does not fit the ranks. ConfigError: replicas without hsdp.
    """
    if replicas and kind != "hsdp":
        raise ConfigError(f"--replicas {replicas} is for --parallel hsdp, not {kind}")
    layout = Layout(dp_replicate=(replicas or 2) if kind == "hsdp" else 1, tp=tp).fit(world_size)
    check_data_parallel(kind, layout)
    return layout
