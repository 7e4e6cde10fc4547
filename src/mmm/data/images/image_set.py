"""Labelled images: sets that are indexed in any order and return normalised float batches.

In use::

    data = load_images("mnist", data_dir="…")          # mmm.data.images.datasets
    images, labels = data.train.images([3, 1, 4])      # (3, 1, 28, 28) float32, (3,) int64
    train = ImageBatches(data.train, global_batch=64, seed=0)          # mmm.data.images.batches
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
Values = tuple[float, ...]  # one a channel


class ImageSet(ABC):
    """Images of one shape with a label each, numbered from 0. It can be pickled, for data loader workers.

    Attributes:
        samples: how many. shape: (channels, height, width) of each.
        labels: (samples,) int64. classes: the name of each label 0, 1, ….
        mean, std: of each channel, for pixels from 0 to 1; ``images`` subtracts and divides by them.
        in_memory: reading needs no decoding, so workers would not help.
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
        """(n, channels, height, width) uint8, in the order of `indices`."""

    @abstractmethod
    def digest(self) -> str:
        """sha256 in hexadecimal of what decides every pixel and label of the set."""

    def images(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Any samples in any order: (n, channels, height, width) float32, normalised, and (n,) int64.

        Raises:
            DataError: an image cannot be read.
        """
        chosen = np.asarray(indices, np.int64)
        return self.normalise(self.pixels(chosen)), self.labels[chosen]

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 → float32: (pixels / 255 − mean) / std by channel, with contiguous strides.

        Resized grey images have stride 1 for the channel, which PyTorch calls contiguous, and which makes convolutions
        return channels-last activations.
        """
        mean, std = (torch.tensor(values).view(-1, 1, 1) * 255 for values in (self.mean, self.std))
        own = pixels.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return own.sub_(mean).div_(std)


class ImagesInMemory(ImageSet):
    """Images in memory as uint8, converted to the requested shape when they are read.

    Args:
        pixels: (samples, channels, height, width) uint8. labels: (samples,) integers.
        mean, std: one value a channel of `pixels`.
        image_size: height and width to return, None for those of `pixels`. channels: 1 or 3, None likewise.
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
        self._pixels = torch.from_numpy(np.require(pixels, np.uint8, ("C", "W")))  # copied only where it is read-only
        self.labels = torch.from_numpy(np.array(labels, np.int64))
        self.samples, stored, height, width = self._pixels.shape
        self.shape = (channels or stored, image_size or height, image_size or width)
        self.classes = tuple(classes)
        self.mean = convert_statistics(mean, self.shape[0])
        self.std = convert_statistics(std, self.shape[0])

    def pixels(self, indices: Indices) -> Tensor:
        chosen = self._pixels[np.asarray(indices, np.int64)]
        return resize(convert_channels(chosen, self.shape[0]), self.shape[1:])

    def digest(self) -> str:
        digest = hashlib.sha256(self._pixels.numpy().data)
        digest.update(self.labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class ImageData:
    """A set to train on and one to test on.

    Attributes:
        name: the data set in use. asked: the requested one; another only where `note` says why.
        source: the folder or the maker it was read from, for people.
        note: what a user has to know, such as that another data set replaces the requested one; empty if nothing. It is
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
        """(channels, height, width)"""
        return self.train.shape

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @cached_property
    def sha256(self) -> str:
        """Of both sets: equal where two runs, or two ranks, read the same images and labels."""
        return hashlib.sha256(f"{self.train.digest()} {self.test.digest()} {self.shape}".encode()).hexdigest()

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
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


# --- shapes ---------------------------------------------------------------------------------------------------------

_LUMA = (299, 587, 114)  # thousandths, ITU-R BT.601: how much red, green and blue make grey


def convert_channels(pixels: Tensor, channels: int) -> Tensor:
    """(n, 1 or 3, height, width) uint8 to that many channels: grey is repeated, colour is averaged by luma weights."""
    if pixels.shape[1] == channels:
        return pixels
    if pixels.shape[1] == 1:
        return pixels.expand(-1, channels, -1, -1)
    weighted = pixels.int() * torch.tensor(_LUMA).view(3, 1, 1)
    return ((weighted.sum(1, keepdim=True) + 500) // 1000).to(torch.uint8)


def convert_statistics(values: Values, channels: int) -> Values:
    """A mean or a standard deviation after ``convert_channels``; of grey made from colour, the latter is a bound."""
    if len(values) == channels:
        return values
    if len(values) == 1:
        return values * channels
    return (sum(weight * value for weight, value in zip(_LUMA, values, strict=True)) / 1000,)


def resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """(n, channels, height, width) uint8 at another height and width, bilinear with antialiasing.

    PyTorch computes this in integers, so the result does not depend on the batch that an image is in.
    """
    if tuple(pixels.shape[-2:]) == tuple(size):
        return pixels
    if not len(pixels):
        return pixels.new_empty(0, pixels.shape[1], *size)
    return F.interpolate(pixels.contiguous(), size=size, mode="bilinear", antialias=True)
