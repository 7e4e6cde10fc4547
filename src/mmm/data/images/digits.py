"""1,797 handwritten digits of 8 × 8 pixels that come with this package; ``embedded/README.md`` says where from."""

from __future__ import annotations

import gzip
import io
from importlib import resources

import numpy as np

from mmm.data.images.image_set import ImagesInMemory, Values

SOURCE = "1,797 handwritten 8×8 digits of 13 people (UCI, Alpaydin and Kaynak 1998), which come with mmm"
# Mean and standard deviation of the training images at 28 × 28, for pixels from 0 to 1.
MEAN: Values = (0.3053,)
STD: Values = (0.3240,)


def read() -> tuple[np.ndarray, np.ndarray]:
    """The digits as they are published: (1797, 8, 8) uint8 from 0 to 16, and (1797,) labels."""
    file = resources.files("mmm.data.images").joinpath("embedded/digits.csv.gz")
    text = gzip.decompress(file.read_bytes())
    # (1797, 65): a digit's 64 pixels and its label in each row
    table = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.uint8)
    pixels = table[:, :64]
    labels = table[:, 64]
    return pixels.reshape(-1, 8, 8), labels


def load(image_size: int, channels: int) -> tuple[ImagesInMemory, ImagesInMemory]:
    """1,437 digits for training and 360 for testing. The split is always the same, with a fifth of each class."""
    images, labels = read()
    # From 0 … 16 to 0 … 255, rounded.
    scaled = (images.astype(np.uint16) * 255 + 8) // 16
    # (1797, 1, 8, 8)
    pixels = scaled.astype(np.uint8)[:, None]
    shuffled = np.random.RandomState(1797).permutation(len(labels))
    # The sort is stable: within a class the digits stay shuffled.
    order = np.argsort(labels[shuffled], kind="stable")
    by_class = shuffled[order]
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[by_class[::5]] = True

    def subset(chosen: np.ndarray) -> ImagesInMemory:
        return ImagesInMemory(
            pixels[chosen],
            labels[chosen],
            classes=tuple("0123456789"),
            mean=MEAN,
            std=STD,
            image_size=image_size,
            channels=channels,
        )

    return subset(~held_out), subset(held_out)
