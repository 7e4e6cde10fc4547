"""MNIST, Fashion-MNIST and CIFAR-10 by torchvision: its addresses, its hashes and its readers.

torchvision takes seconds to import: it is imported where the files are there, or can be had.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.cache import cache_folder, download_once
from mmm.data.images.image_set import ImageData, ImagesInMemory, Values
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import read_file

# By name: torchvision's class, the side of an image in pixels, and mean and standard deviation of each channel of the
# training images, for pixels from 0 to 1.
PUBLISHED: dict[str, tuple[str, int, Values, Values]] = {
    "mnist": ("MNIST", 28, (0.1307,), (0.3081,)),
    "fashion_mnist": ("FashionMNIST", 28, (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
SERVERS = {  # the first that torchvision asks
    "mnist": "https://ossci-datasets.s3.amazonaws.com",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "cifar10": "https://www.cs.toronto.edu",
}
Arrays = tuple[np.ndarray, np.ndarray]  # images (n, channels, height, width) uint8, labels (n,)


def load(name: str, folder: Path | None, image_size: int | None, channels: int | None) -> ImageData:
    """A published data set.

    Args:
        folder: where its files are; only read. None: the cache, into which it is downloaded once.

    Raises:
        Refused: it is not in the cache and cannot be downloaded.
        DataError: `folder` lacks the data, or a file is damaged.
    """
    class_name, _, mean, std = PUBLISHED[name]
    if folder is None:
        folder = cache_folder() / name
        download_once(folder, lambda part: _download(name, part))
    dataset = getattr(import_torchvision("datasets"), class_name)
    read = _read_cifar if name == "cifar10" else _read_mnist
    classes, train, test = read(dataset, folder)
    train_set, test_set = (
        ImagesInMemory(*arrays, classes, mean, std, image_size, channels) for arrays in (train, test)
    )
    return ImageData(train_set, test_set, name, name, str(folder))


def _download(name: str, folder: Path) -> None:
    """Raises OSError, RuntimeError: the files are not to be had."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    with contextlib.suppress(HTTPError):  # an answer, to a question that is not torchvision's
        urlopen(SERVERS[name]).close()
    dataset = getattr(import_torchvision("datasets"), PUBLISHED[name][0])
    dataset(os.fspath(folder), download=True)


def _read_mnist(dataset: Any, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """From the four files as they are published, in `folder` or where torchvision keeps them in it."""
    names = [name for name, _ in dataset.resources]
    for place in (folder, folder / dataset.__name__ / "raw"):
        if all((place / name).is_file() for name in names):
            files = [_unpacked(place / name, md5) for name, md5 in dataset.resources]
            # Headers of 16 and 8 bytes: the files are the published ones, by their hash.
            pixels = [np.frombuffer(content, np.uint8, offset=16).reshape(-1, 1, 28, 28) for content in files[::2]]
            labels = [np.frombuffer(content, np.uint8, offset=8) for content in files[1::2]]
            return tuple(dataset.classes), (pixels[0], labels[0]), (pixels[1], labels[1])
    raise DataError(f"{folder} does not hold {dataset.__name__}: it needs {', '.join(names)}")


def _unpacked(path: Path, md5: str) -> bytes:
    """A .gz file's content. Raises DataError: the file is not the published one."""
    with reading(path):
        packed = read_file(path)
    own = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    if own != md5:
        raise DataError(
            f"{path} ({len(packed)} bytes) has md5 {own}, not {md5} as published: it is damaged, or another file"
        )
    return gzip.decompress(packed)


def _read_cifar(dataset: Any, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """From ``cifar-10-batches-py`` in `folder`."""
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
    pixels = cifar.data.transpose(0, 3, 1, 2)  # (n, 32, 32, 3) → (n, 3, 32, 32)
    return pixels, np.array(cifar.targets)
