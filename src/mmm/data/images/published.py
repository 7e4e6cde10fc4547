"""MNIST, Fashion-MNIST and CIFAR-10 by torchvision: its addresses, its hashes and its readers."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.cache import cache_folder, download_once
from mmm.data.images.image_set import ImageData, ImagesInMemory, Values
from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import DataError
from mmm.outside import read_file

# By name: torchvision's class, the side of an image in pixels, and mean and standard deviation of each channel of the
# training images, for pixels from 0 to 1.
PUBLISHED: dict[str, tuple[str, int, Values, Values]] = {
    "mnist": ("MNIST", 28, (0.1307,), (0.3081,)),
    "fashion_mnist": ("FashionMNIST", 28, (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
IMAGES_HEADER, LABELS_HEADER = 16, 8  # bytes of MNIST's files before the pixels, and before the labels
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
    dataset = getattr(import_torchvision("datasets"), class_name)
    if folder is None:
        folder = cache_folder() / name
        download_once(folder, lambda part: dataset(os.fspath(part), download=True))
    read = _read_cifar if name == "cifar10" else _read_mnist
    classes, train, test = read(dataset, folder)
    try:
        train_set = ImagesInMemory(*train, classes, mean, std, image_size, channels)
        test_set = ImagesInMemory(*test, classes, mean, std, image_size, channels)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    return ImageData(train_set, test_set, name, name, str(folder))


def _read_mnist(dataset: Any, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """From the four files as they are published, in `folder` or where torchvision keeps them in it; else from the
    unpacked ones of torchvision's layout."""
    names = [name for name, _ in dataset.resources]
    for place in (folder, folder / dataset.__name__ / "raw"):
        if all(os.path.isfile(place / name) for name in names):
            files = [_unpacked(place / name, md5) for name, md5 in dataset.resources]
            train = _mnist_images(files[0]), _mnist_labels(files[1])
            test = _mnist_images(files[2]), _mnist_labels(files[3])
            return tuple(dataset.classes), train, test
    raw = folder / dataset.__name__ / "raw"
    if not all(os.path.isfile(raw / name.removesuffix(".gz")) for name in names):
        raise DataError(
            f"{folder} does not hold {dataset.__name__}: it needs {', '.join(names)}, or {dataset.__name__}/raw with "
            f"these files unpacked"
        )
    try:
        train_set = dataset(os.fspath(folder), train=True)
        test_set = dataset(os.fspath(folder), train=False)
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        raise DataError(f"{raw} has a damaged file ({error}): fetch it again") from None
    train = train_set.data.numpy()[:, None], train_set.targets.numpy()
    test = test_set.data.numpy()[:, None], test_set.targets.numpy()
    return tuple(dataset.classes), train, test


def _unpacked(path: Path, md5: str) -> bytes:
    """A .gz file's content. Raises DataError: the file is not the published one."""
    try:
        packed = read_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    _check_md5(path, packed, md5)
    try:
        return gzip.decompress(packed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): fetch it again") from None


def _check_md5(path: Path, content: bytes, md5: str) -> None:
    """Raises DataError."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(
            f"{path} ({len(content)} bytes) has md5 {found}, not {md5} as published: it is damaged, or another file; "
            f"fetch it again"
        )


# Only of files whose hash is that of the published ones, whose headers are known.


def _mnist_images(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8, offset=IMAGES_HEADER).reshape(-1, 1, 28, 28)


def _mnist_labels(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8, offset=LABELS_HEADER)


def _read_cifar(dataset: Any, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """From ``cifar-10-batches-py`` in `folder`."""
    # torchvision checks the hashes as well, before it unpickles, but does not say which file is damaged.
    batches = folder / dataset.base_folder
    for name, md5 in [*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])]:
        try:
            content = read_file(batches / name)
        except OSError as error:
            raise DataError(
                f"{folder} does not hold {dataset.__name__}: {batches / name}: {error.strerror or error}. It needs "
                f"{dataset.base_folder}, unpacked from {dataset.filename}"
            ) from None
        _check_md5(batches / name, content, md5)
    train_set = dataset(os.fspath(folder), train=True)
    test_set = dataset(os.fspath(folder), train=False)
    return tuple(train_set.classes), _cifar_arrays(train_set), _cifar_arrays(test_set)


def _cifar_arrays(cifar: Any) -> Arrays:
    pixels = cifar.data.transpose(0, 3, 1, 2)  # (n, 32, 32, 3) → (n, 3, 32, 32)
    return pixels, np.array(cifar.targets)
