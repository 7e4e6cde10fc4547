"""Small data sets in the layouts of MNIST and CIFAR-10, whose hashes `published` is made to expect."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmm.data.images.published import MNIST_FILES, PUBLISHED, Published


def mnist_arrays() -> list[np.ndarray]:
    """Images and labels to train on, and to test on."""
    numbers = np.random.RandomState(0)
    shapes = ((20, 28, 28), (20,), (7, 28, 28), (7,))
    return [numbers.randint(0, 256 if len(shape) > 1 else 10, shape).astype(np.uint8) for shape in shapes]


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.tobytes()


def write_mnist(folder: Path) -> None:
    """The four files as they are published."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(MNIST_FILES, mnist_arrays(), strict=True):
        (folder / name).write_bytes(gzip.compress(idx_bytes(array), mtime=0))


def write_cifar(folder: Path, images: int) -> None:
    """Six batches of noise, each of so many images, whose labels are the batch's number, 1, 2, 3, …"""
    for number, name in enumerate(PUBLISHED["cifar10"].files):
        pixels = np.random.RandomState(number).randint(0, 256, (images, 3072)).astype(np.uint8)
        labels = [number, *(i % 10 for i in range(1, images))]
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps({"data": pixels, "labels": labels}, protocol=2))


def expected(name: str, folder: Path, **changes: str) -> Published:
    """The published data set of this name, as if the files in a folder were its own."""
    data = PUBLISHED[name]
    files = {file: hashlib.md5((folder / file).read_bytes()).hexdigest() for file in data.files}
    return replace(data, files=files, **changes)
