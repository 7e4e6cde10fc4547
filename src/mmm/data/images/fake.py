"""Generated images that a model can learn: each class has a smooth pattern, under noise."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from mmm.data.images.image_set import ImageSet, Indices, Values
from mmm.data.order import stream

# A pattern is this many plane waves per channel, each with at most 3 periods over the image.
WAVES = 3


class FakeImages(ImageSet):
    """Image i is of class i mod `classes`: its pattern, brighter or darker, under noise that depends on (seed, i).

    Args:
        samples: number of images.
        shape: (channels, height, width) of an image.
        classes: number of classes.
        seed: seed of the patterns and the noise.
        first: index i of the set's first image; a test set starts where the training set ends.
    """

    def __init__(
        self,
        samples: int,
        shape: tuple[int, int, int],
        classes: int,
        seed: int,
        first: int = 0,
    ) -> None:
        self.samples = samples
        self.shape = shape
        self.seed = seed
        self.first = first
        self.labels = torch.arange(first, first + samples) % classes
        self.classes = tuple(map(str, range(classes)))
        self.mean: Values = (0.5,) * shape[0]
        self.std: Values = (0.25,) * shape[0]
        # (classes, channels, height, width)
        self._patterns = torch.from_numpy(_patterns(classes, shape, seed))

    def pixels(self, indices: Indices) -> Tensor:
        n = len(indices)
        noise = np.empty((n, *self.shape), dtype=np.uint8)
        brightness = np.empty((n, 1, 1, 1), dtype=np.int16)
        # Made once: seeding it again is far cheaper.
        state = np.random.RandomState(0)
        for i, index in enumerate(indices):
            image_index = self.first + int(index)
            state.seed(stream(self.seed, 2, image_index))
            brightness[i] = state.randint(-32, 33)
            drawn = state.bytes(noise[i].size)
            image_noise = np.frombuffer(drawn, np.uint8)
            noise[i] = image_noise.reshape(self.shape)
        labels = self.labels[np.asarray(indices, np.int64)]
        # Around 128: the pattern is −48 … 48, the noise −64 … 63, the brightness −32 … 32. Where all three are near
        # their extremes, the sum leaves 0 … 255 and wraps around.
        halved_noise = torch.from_numpy(noise) >> 1
        image = self._patterns[labels] + halved_noise.short()
        image = image + torch.from_numpy(brightness) + 64
        return image.to(torch.uint8)

    def digest(self) -> str:
        n_classes = len(self.classes)
        rule = f"{self.seed} {self.first} {self.samples} {self.shape} {n_classes} "
        digest = hashlib.sha256(rule.encode())
        digest.update(self._patterns.numpy().tobytes())
        return digest.hexdigest()


def _patterns(classes: int, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """(classes, channels, height, width) int16, −48 … 48: each a sum of slow plane waves."""
    channels, height, width = shape
    # From 0 to 1 over the image: (height, 1) and (width,).
    rows = np.arange(height)[:, None] / height
    columns = np.arange(width) / width
    waves = np.zeros((classes, *shape))
    for label in range(classes):
        state = np.random.RandomState(stream(seed, 1, label))
        for channel in range(channels):
            for _ in range(WAVES):
                down, right = state.randint(-3, 4, size=2)
                # (height, width), in periods
                phase = down * rows + right * columns + state.uniform()
                waves[label, channel] += np.cos(2 * np.pi * phase)
    return np.rint(waves * 48 / WAVES).astype(np.int16)
