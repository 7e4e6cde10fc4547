"""Labelled images: sets that are indexed in any order and return normalised float batches.

In use::

    data = load_images("mnist", data_dir="…")          # mmm.data.images.datasets
    images, labels = data.train.images([3, 1, 4])      # (3, 1, 28, 28) float32, (3,) int64
    train = BatchOrder(data.train, global_batch=64, seed=0)          # mmm.data.images.batches
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Indices = Sequence[int] | np.ndarray
# A mean or a standard deviation, one value per channel.
Values = tuple[float, ...]


class ImageSet(ABC):
    """Images of one shape with a label each, indexed from 0. A set can be pickled, for data loader workers.

    Attributes:
        samples: number of images.
        shape: (channels, height, width) of each image.
        labels: (samples,) int64.
        classes: name of each label 0, 1, ….
        mean, std: one value per channel, for pixels from 0 to 1. ``images`` subtracts the mean and divides by std.
        in_memory: whether reading needs no decoding, so that workers would not help.
    """

    samples: int
    shape: tuple[int, int, int]
    labels: Tensor
    classes: tuple[str, ...]
    mean: Values
    std: Values
    in_memory = True

    @abstractmethod
    def pixels(self, indices: Indices) -> Tensor:
        """Read images: (n, channels, height, width) uint8, in the order of `indices`."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of what determines every pixel and label of the set."""

    def images(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Read any samples in any order: images (n, channels, height, width) float32, normalised; labels (n,) int64.

        Raises:
            DataError: an image cannot be read.
        """
        chosen = np.asarray(indices, np.int64)
        return self.normalise(self.pixels(chosen)), self.labels[chosen]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert uint8 to float32: (pixels / 255 − mean) / std by channel.

        Args:
            pixels: (n, channels, height, width) uint8, from 0 to 255.
        """
        # (channels, 1, 1), for pixels from 0 to 1
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        # A resized grey image has stride 1 for its channel. PyTorch calls that contiguous, but convolutions then return
        # channels-last activations. A copy has the strides of its shape.
        copy = pixels.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        copy.sub_(mean * 255)
        return copy.div_(std * 255)


class ImagesInMemory(ImageSet):
    """Images in memory as uint8, converted to the requested shape when they are read.

    Args:
        pixels: (samples, channels, height, width) uint8.
        labels: (samples,) integers.
        classes: name of each label.
        mean, std: one value per channel of `pixels`.
        image_size: height and width to return; None keeps those of `pixels`.
        channels: 1 for grey or 3 for colour; None keeps those of `pixels`.
    """

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        mean: Values,
        std: Values,
        image_size: int | None = None,
        channels: int | None = None,
    ) -> None:
        # Copies only an array that is read-only or not contiguous.
        own = np.require(pixels, np.uint8, ("C", "W"))
        self._pixels = torch.from_numpy(own)
        self.labels = torch.from_numpy(np.array(labels, np.int64))
        self.samples, stored, height, width = self._pixels.shape
        self.shape = (channels or stored, image_size or height, image_size or width)
        self.classes = tuple(classes)
        self.mean = convert_statistics(mean, self.shape[0])
        self.std = convert_statistics(std, self.shape[0])

    def pixels(self, indices: Indices) -> Tensor:
        chosen = self._pixels[np.asarray(indices, np.int64)]
        converted = convert_channels(chosen, self.shape[0])
        return resize(converted, self.shape[1:])

    def digest(self) -> str:
        digest = hashlib.sha256(self._pixels.numpy().data)
        digest.update(self.labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class ImageData:
    """A set to train on and one to test on.

    Attributes:
        train: the set to train on.
        test: the set to test on.
        name: name of the data set in use.
        asked: name of the data set that was asked for; if it is another one, `note` says why.
        source: where it comes from, for people: a folder or its authors.
        note: what a user has to know, such as that another data set replaces the requested one; may be empty. It is
            logged and kept in the run's record.
    """

    train: ImageSet
    test: ImageSet
    name: str
    asked: str
    source: str
    note: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of each image."""
        return self.train.shape

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of both sets. Two runs, or two ranks, have the same one if they read the same images and labels."""
        text = f"{self.train.digest()} {self.test.digest()} {self.shape}"
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> dict[str, object]:
        """The facts about the data that a run's record keeps."""
        return {
            "dataset": self.name,
            "dataset_asked": self.asked,
            "source": self.source,
            "train_images": self.train.samples,
            "test_images": self.test.samples,
            "image_shape": list(self.shape),
            "classes": len(self.classes),
            "class_names": list(self.classes),
            "sha256": self.sha256,
            "note": self.note,
        }


# How much red, green and blue make grey, in thousandths (ITU-R BT.601).
_LUMA = (299, 587, 114)


def convert_channels(pixels: Tensor, channels: int) -> Tensor:
    """Convert images between grey and colour: grey is repeated, colour is averaged with the weights of luma.

    Args:
        pixels: (n, 1 or 3, height, width) uint8.
        channels: 1 or 3.
    """
    own_channels = pixels.shape[1]
    if own_channels == channels:
        return pixels
    if own_channels == 1:
        return pixels.expand(-1, channels, -1, -1)
    weights = torch.tensor(_LUMA).view(3, 1, 1)
    # (n, 1, height, width), in thousandths
    weighted = (pixels.int() * weights).sum(1, keepdim=True)
    # In integers, rounded to the nearest: the same on every machine.
    grey = (weighted + 500) // 1000
    return grey.to(torch.uint8)


def convert_statistics(values: Values, channels: int) -> Values:
    """Convert a mean or a standard deviation as ``convert_channels`` converts images.

    For grey made from colour, the standard deviation is an upper bound.
    """
    if len(values) == channels:
        return values
    if len(values) == 1:
        return values * channels
    pairs = zip(_LUMA, values, strict=True)
    weighted = sum(weight * value for weight, value in pairs)
    return (weighted / 1000,)


def resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images to (height, width), bilinear with antialiasing.

    PyTorch computes this in integers, so an image's result does not depend on the other images in the batch.

    Args:
        pixels: (n, channels, height, width) uint8.
        size: (height, width) to return.
    """
    if tuple(pixels.shape[-2:]) == tuple(size):
        return pixels
    # F.interpolate refuses an empty batch.
    if not len(pixels):
        return pixels.new_empty(0, pixels.shape[1], *size)
    return F.interpolate(pixels.contiguous(), size=size, mode="bilinear", antialias=True)
