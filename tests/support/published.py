"""Small data sets in the layouts of MNIST and CIFAR-10, whose hashes torchvision is made to expect."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.images.torchvision_shim import import_torchvision

# Names as MNIST is published.
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def mnist_arrays() -> list[np.ndarray]:
    """Images and labels to train on, and to test on."""
    rng = np.random.RandomState(0)
    shapes = ((20, 28, 28), (20,), (7, 28, 28), (7,))
    return [rng.randint(0, 256 if len(shape) > 1 else 10, shape).astype(np.uint8) for shape in shapes]


def idx_bytes(array: np.ndarray) -> bytes:
    # 8: unsigned bytes.
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    head = bytes((0, 0, 8, array.ndim)) + sizes
    return head + array.tobytes()


def write_mnist(folder: Path, arrays: list[np.ndarray] | None = None, dataset: str = "MNIST") -> Path:
    """Write the four files where torchvision keeps them, of `mnist_arrays` unless others are given. Returns where."""
    raw = folder / dataset / "raw"
    raw.mkdir(parents=True)
    for name, array in zip(MNIST_FILES, arrays or mnist_arrays(), strict=True):
        (raw / name).write_bytes(idx_bytes(array))
    return raw


def publish_mnist(folder: Path) -> list[tuple[str, str]]:
    """Write the four files as they are published. Returns what torchvision's MNIST has to have as ``resources``."""
    folder.mkdir()
    resources = []
    for name, array in zip(MNIST_FILES, mnist_arrays(), strict=True):
        path = folder / f"{name}.gz"
        path.write_bytes(gzip.compress(idx_bytes(array), mtime=0))
        resources.append((path.name, _md5(path)))
    return resources


def write_cifar(folder: Path, images: int) -> None:
    """Six batches of noise, each of so many images, whose labels are the batch's number, 1, 2, 3, …"""
    dataset = import_torchvision("datasets").CIFAR10
    folder.mkdir(parents=True)
    for index, (name, _) in enumerate([*dataset.train_list, *dataset.test_list]):
        pixels = np.random.RandomState(index).randint(0, 256, (images, 3072)).astype(np.uint8)
        labels = [index, *(i % 10 for i in range(1, images))]
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}, protocol=2))
    names = {dataset.meta["key"]: [f"class {index}" for index in range(10)]}
    (folder / dataset.meta["filename"]).write_bytes(pickle.dumps(names, protocol=2))


def expected_cifar(folder: Path) -> dict[str, Any]:
    """What torchvision's CIFAR10 has to have as attributes, to read a folder of `write_cifar`."""
    dataset = import_torchvision("datasets").CIFAR10
    attributes: dict[str, Any] = {
        listed: [[name, _md5(folder / name)] for name, _ in getattr(dataset, listed)]
        for listed in ("train_list", "test_list")
    }
    attributes["meta"] = {**dataset.meta, "md5": _md5(folder / dataset.meta["filename"])}
    return attributes


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()
