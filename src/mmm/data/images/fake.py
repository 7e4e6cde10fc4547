"""Generated images that can be learned: each class has a smooth pattern, under noise."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from mmm.data.images.image_set import ImageSet, Indices, Values
from mmm.data.order import stream

WAVES = 3  # a pattern is this many plane waves a channel, of at most 3 periods over the image


class FakeImages(ImageSet):
    """Image i is of class i mod `classes`: its pattern, brighter or darker, under noise drawn for (seed, i) alone.

    Args:
        samples: how many. shape: (channels, height, width). classes: how many.
        first: the number of the set's first image; a test set starts where the training set ends.
    """

    def __init__(self, samples: int, shape: tuple[int, int, int], classes: int, seed: int, first: int = 0) -> None:
        self.samples = samples
        self.shape = shape
        self.seed = seed
        self.first = first
        self.labels = torch.arange(first, first + samples) % classes
        self.classes = tuple(str(number) for number in range(classes))
        self.mean: Values = (0.5,) * shape[0]
        self.std: Values = (0.25,) * shape[0]
        self._patterns = torch.from_numpy(_patterns(classes, shape, self.seed))  # (classes, channels, height, width)

    def pixels(self, indices: Indices) -> Tensor:
        noise = np.empty((len(indices), *self.shape), dtype=np.uint8)
        bright = np.empty((len(indices), 1, 1, 1), dtype=np.int16)
        state = np.random.RandomState(0)  # made once: seeding it again is far cheaper
        for i, index in enumerate(indices):
            state.seed(stream(self.seed, 2, self.first + int(index)))
            bright[i] = state.randint(-32, 33)
            noise[i] = np.frombuffer(state.bytes(noise[i].size), np.uint8).reshape(self.shape)
        # A pattern is −48 … 48, the noise −64 … 63, the brightness −32 … 32, around 128: none leaves 0 … 255.
        image = self._patterns[self.labels[np.asarray(indices, np.int64)]] + (torch.from_numpy(noise) >> 1).short()
        return (image + torch.from_numpy(bright) + 64).to(torch.uint8)

    def digest(self) -> str:
        rule = f"{self.seed} {self.first} {self.samples} {self.shape} {len(self.classes)} "
        return hashlib.sha256(rule.encode() + self._patterns.numpy().tobytes()).hexdigest()


def _patterns(classes: int, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """(classes, channels, height, width) int16, −48 … 48: a sum of slow plane waves."""
    channels, height, width = shape
    rows = (np.arange(height) / height)[:, None]
    columns = np.arange(width) / width
    waves = np.zeros((classes, *shape))
    for label in range(classes):
        state = np.random.RandomState(stream(seed, 1, label))
        for channel in range(channels):
            for _ in range(WAVES):
                down, right = state.randint(-3, 4, size=2)
                waves[label, channel] += np.cos(2 * np.pi * (down * rows + right * columns + state.uniform()))
    return np.rint(waves * 48 / WAVES).astype(np.int16)
