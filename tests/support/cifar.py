"""Small files in CIFAR-10's layout, which torchvision is made to expect."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np

from mmm.data.images.torchvision_shim import import_torchvision


def write_cifar(folder: Path, images: int) -> None:
    """Six batches of noise, each of so many images, whose labels are the batch's number, 1, 2, 3, …"""
    dataset = import_torchvision("datasets").CIFAR10
    folder.mkdir(parents=True)
    for number, (name, _) in enumerate([*dataset.train_list, *dataset.test_list]):
        pixels = np.random.RandomState(number).randint(0, 256, (images, 3072)).astype(np.uint8)
        labels = [number, *(i % 10 for i in range(1, images))]
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}, protocol=2))


def expected_of(folder: Path) -> dict[str, list[list[str]]]:
    """What torchvision's CIFAR10 has to have as ``train_list`` and ``test_list``, to read a folder of `write_cifar`."""
    dataset = import_torchvision("datasets").CIFAR10
    return {
        listed: [[name, hashlib.md5((folder / name).read_bytes()).hexdigest()] for name, _ in getattr(dataset, listed)]
        for listed in ("train_list", "test_list")
    }
