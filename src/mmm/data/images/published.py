"""MNIST, Fashion-MNIST and CIFAR-10 by torchvision: its addresses, its hashes and its readers.

torchvision takes seconds to import. It is imported only when the files are there or can be downloaded.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmm.data.cache import cache_folder, download_once
from mmm.data.images.image_set import ImageData, ImagesInMemory, Values
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DataError


class Published(NamedTuple):
    """A published data set.

    Attributes:
        class_name: torchvision's class for it.
        size: height and width of an image, in pixels.
        mean, std: one value per channel over the training images, for pixels from 0 to 1.
    """

    class_name: str
    size: int
    mean: Values
    std: Values


PUBLISHED = {
    "mnist": Published("MNIST", 28, (0.1307,), (0.3081,)),
    "fashion_mnist": Published("FashionMNIST", 28, (0.2860,), (0.3530,)),
    "cifar10": Published("CIFAR10", 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
# The first server that torchvision asks for each.
SERVERS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "cifar10": "https://www.cs.toronto.edu",
}


def load(name: str, folder: Path | None, image_size: int | None, channels: int | None) -> ImageData:
    """Load a published data set.

    Args:
        name: a name in `PUBLISHED`.
        folder: where its files are; it is only read. None means the cache, into which the files are downloaded once.
        image_size: height and width in pixels; None keeps those of the data set.
        channels: 1 for grey or 3 for colour; None keeps those of the data set.

    Raises:
        Refused: it is not in the cache and cannot be downloaded.
        DataError: `folder` lacks the data, or a file is damaged.
    """
    published = PUBLISHED[name]
    if folder is None:
        folder = cache_folder() / name
        download_once(folder, lambda partial: _download(name, partial))
    dataset = getattr(import_torchvision("datasets"), published.class_name)

    def in_memory(train: bool) -> ImagesInMemory:
        try:
            images = dataset(os.fspath(folder), train=train)
        except (OSError, RuntimeError, ValueError, LookupError, AssertionError) as error:
            raise DataError(
                f"{folder} does not hold {published.class_name}, or a file of it is damaged ({error}): it needs the "
                f"files that torchvision's {published.class_name} downloads"
            ) from None
        pixels = np.asarray(images.data)
        if pixels.ndim == 3:
            # (n, 28, 28) → (n, 28, 28, 1)
            pixels = pixels[..., None]
        return ImagesInMemory(
            # (n, height, width, channels) → (n, channels, height, width)
            pixels.transpose(0, 3, 1, 2),
            np.asarray(images.targets),
            images.classes,
            mean=published.mean,
            std=published.std,
            image_size=image_size,
            channels=channels,
        )

    return ImageData(in_memory(True), in_memory(False), name=name, asked=name, source=str(folder))


def _download(name: str, folder: Path) -> None:
    """Download a data set. Raises OSError, RuntimeError: the files cannot be had."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    # Asks before torchvision is imported. An HTTP error is an answer too: the server can be reached.
    with contextlib.suppress(HTTPError):
        urlopen(SERVERS[name]).close()
    dataset = getattr(import_torchvision("datasets"), PUBLISHED[name].class_name)
    dataset(os.fspath(folder), download=True)
