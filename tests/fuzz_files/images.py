"""Files of images: MNIST, CIFAR-10, folders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fuzz_files.kinds import Kind
from mmm.data.images.datasets import load_images
from mmm.data.images.published import PUBLISHED, Published
from support.published import expected, write_cifar, write_mnist


def make_mnist(folder: Path) -> None:
    write_mnist(folder)


def _read_images(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        data = load_images(name, folder, image_size=8 if name == "folder" else None)
        print(data.describe())
        every = [each.images(range(each.samples)) for each in (data.train, data.test)]
        return data, [each.pixels(range(each.samples)).numpy() for each in (data.train, data.test)], every

    return read


def read_mnist(folder: Path) -> Any:
    with mock.patch.dict(PUBLISHED, mnist=_expected("mnist")):
        return _read_images("mnist")(folder)


def make_cifar(folder: Path) -> None:
    write_cifar(folder, 4)


def read_cifar(folder: Path) -> Any:
    with mock.patch.dict(PUBLISHED, cifar10=_expected("cifar10")):
        return _read_images("cifar10")(folder)


@cache
def _expected(name: str) -> Published:
    """The data set that `make_cifar` or `make_mnist` writes: the same each time."""
    with tempfile.TemporaryDirectory() as folder:
        make = make_cifar if name == "cifar10" else make_mnist
        make(Path(folder))
        return expected(name, Path(folder))


def make_images(folder: Path) -> None:
    from PIL import Image

    numbers = np.random.RandomState(0)
    for label, suffixes in (("cat", ("png", "jpg", "bmp", "ppm")), ("dog", ("png", "tiff", "webp", "jpg"))):
        (folder / label).mkdir()
        for number, suffix in enumerate(suffixes):
            image = Image.fromarray(numbers.randint(0, 256, (12, 10, 3)).astype(np.uint8))
            image.save(folder / label / f"{number}.{suffix}")


NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)
KINDS = (
    Kind("images-mnist", make_mnist, ("*.gz",), read_mnist),
    Kind("images-cifar", make_cifar, ("*/*",), read_cifar, unpickles=NUMPY),
    Kind("images-folder", make_images, ("*/*",), _read_images("folder")),
)
