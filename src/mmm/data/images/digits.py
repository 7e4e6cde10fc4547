"""1,797 handwritten digits of 8 × 8 pixels that come with this package. Where from: ``embedded/README.md`` here."""

from __future__ import annotations

import gzip
import io
from importlib import resources

import numpy as np

from mmm.data.images.image_set import ImagesInMemory, Values

SOURCE = "1,797 handwritten 8×8 digits of 13 people (UCI, Alpaydin and Kaynak 1998), which come with mmm"
MEAN: Values = (0.3053,)  # of the training images, pixels from 0 to 1
STD: Values = (0.3240,)  # of the same, at 28 × 28


def read() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) uint8 from 0 to 16, as published, and (1797,) labels."""
    packed = resources.files("mmm.data.images").joinpath("embedded/digits.csv.gz").read_bytes()
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.uint8)
    return table[:, :64].reshape(-1, 8, 8), table[:, 64]


def load(image_size: int, channels: int) -> tuple[ImagesInMemory, ImagesInMemory]:
    """1,437 digits for training and 360 for testing; every class is split alike, and always the same way."""
    images, labels = read()
    pixels = ((images.astype(np.uint16) * 255 + 8) // 16).astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    shuffled = np.random.RandomState(1797).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[by_class[::5]] = True
    classes = tuple("0123456789")
    train, test = (
        ImagesInMemory(pixels[chosen], labels[chosen], classes, MEAN, STD, image_size, channels)
        for chosen in (~held_out, held_out)
    )
    return train, test
