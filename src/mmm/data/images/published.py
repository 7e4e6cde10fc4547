"""MNIST, Fashion-MNIST and CIFAR-10 by torchvision: its addresses, its hashes and its readers.

torchvision takes seconds to import. It is imported only when the files are there or can be downloaded.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.data.cache import cache_folder, download_once
from mmm.data.images.image_set import ImageData, ImagesInMemory, Values
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import read_file


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
# Images (n, channels, height, width) uint8 and labels (n,).
Arrays = tuple[np.ndarray, np.ndarray]


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
    read = _read_cifar if name == "cifar10" else _read_mnist
    classes, train, test = read(dataset, folder)

    def in_memory(arrays: Arrays) -> ImagesInMemory:
        pixels, labels = arrays
        return ImagesInMemory(
            pixels,
            labels,
            classes,
            mean=published.mean,
            std=published.std,
            image_size=image_size,
            channels=channels,
        )

    train_set = in_memory(train)
    test_set = in_memory(test)
    return ImageData(train_set, test_set, name=name, asked=name, source=str(folder))


def _download(name: str, folder: Path) -> None:
    """Download a data set. Raises OSError, RuntimeError: the files cannot be had."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    # Asks before torchvision is imported. An HTTP error is an answer too: the server can be reached.
    with contextlib.suppress(HTTPError):
        urlopen(SERVERS[name]).close()
    dataset = getattr(import_torchvision("datasets"), PUBLISHED[name].class_name)
    dataset(os.fspath(folder), download=True)


def _read_mnist(dataset: Any, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """Read the four files as they are published, from `folder` or from where torchvision keeps them in it."""
    names = [name for name, _ in dataset.resources]
    for place in (folder, folder / dataset.__name__ / "raw"):
        if not all((place / name).is_file() for name in names):
            continue
        files = [_unpacked(place / name, md5) for name, md5 in dataset.resources]
        # In torchvision's order: train images, train labels, test images, test labels.
        train = _mnist_arrays(files[0], files[1])
        test = _mnist_arrays(files[2], files[3])
        return tuple(dataset.classes), train, test
    raise DataError(f"{folder} does not hold {dataset.__name__}: it needs {', '.join(names)}")


def _mnist_arrays(images: bytes, labels: bytes) -> Arrays:
    # The headers need no check: by their hash, the files are the published ones.
    pixels = np.frombuffer(images, np.uint8, offset=16)
    return pixels.reshape(-1, 1, 28, 28), np.frombuffer(labels, np.uint8, offset=8)


def _unpacked(path: Path, md5: str) -> bytes:
    """The content of a .gz file. Raises DataError: the file is not the published one."""
    with reading(path):
        packed = read_file(path)
    own = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    if own != md5:
        raise DataError(
            f"{path} ({len(packed)} bytes) has md5 {own}, not {md5} as published: it is damaged, or another file"
        )
    return gzip.decompress(packed)


def _read_cifar(dataset: Any, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """Read ``cifar-10-batches-py`` in `folder`. torchvision checks the hashes."""
    try:
        train_set = dataset(os.fspath(folder), train=True)
        test_set = dataset(os.fspath(folder), train=False)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{folder} does not hold {dataset.__name__}, or a file of it is damaged ({error}). It needs "
            f"{dataset.base_folder}, unpacked from {dataset.filename}"
        ) from None
    return tuple(train_set.classes), _cifar_arrays(train_set), _cifar_arrays(test_set)


def _cifar_arrays(cifar: Any) -> Arrays:
    # (n, 32, 32, 3) → (n, 3, 32, 32)
    pixels = cifar.data.transpose(0, 3, 1, 2)
    return pixels, np.array(cifar.targets)
