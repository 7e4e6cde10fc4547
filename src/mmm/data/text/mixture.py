"""Samples of several sources, in a fixed proportion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mmm.data.order import stream
from mmm.data.text.tokens import Tokens
from mmm.errors import ConfigError


class Mixture(Tokens):
    """Samples of several sources, in a fixed proportion.

    Every `BLOCK` samples have the same number of each source, in an order that depends on (seed, block): which source
    a sample has, and how many that had before, follow from its number. A source that ends begins its next epoch.

    Args:
        sources: of one sequence length. weights: of each source; their sum does not matter.

    Attributes:
        samples: of all sources together: what counts as an epoch.

    Raises:
        ConfigError: a weight is so small that its source would have no sample.
    """

    BLOCK = 1 << 16

    def __init__(self, sources: Sequence[Tokens], weights: Sequence[float], seed: int) -> None:
        super().__init__(sources[0].seq_length, seed)
        self.sources, self.has_padding = tuple(sources), any(source.has_padding for source in sources)
        self.samples = sum(source.samples for source in sources)
        ends = np.rint(np.cumsum(weights) / np.sum(weights) * self.BLOCK).astype(np.int64)
        self.quota = np.diff(ends, prepend=0)  # samples of each source in a block
        if self.quota.min() < 1:
            raise ConfigError(
                f"--text: a weight of {min(weights)} in {sum(weights)} is less than one sample in {self.BLOCK}"
            )

    def begin(self, step: int, global_batch: int) -> tuple[int, int]:
        return 0, step * global_batch  # each source has epochs of its own

    def source_of(self, number: int) -> tuple[int, int]:
        """The source of a sample, and how many samples that source has had before it."""
        block, place = divmod(number, self.BLOCK)
        sources, before = _block(self.seed, block, tuple(self.quota))
        source = int(sources[place])
        return source, block * int(self.quota[source]) + int(before[place])

    def sample(self, epoch: int, place: int) -> np.ndarray:
        source, count = self.source_of(epoch * self.samples + place)
        row = self.sources[source].sample(*divmod(count, self.sources[source].samples))
        return np.stack((row[:-1], row[1:])) if self.has_padding and row.ndim == 1 else row


@lru_cache(maxsize=4)
def _block(seed: int, block: int, quota: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample of a block its source, and how many of that source come before it in the block."""
    state = np.random.RandomState(stream(seed, block & 0xFFFFFFFF, block >> 32, 1))
    sources = state.permutation(np.repeat(np.arange(len(quota)), quota))
    before = np.empty_like(sources)
    for source, count in enumerate(quota):
        before[sources == source] = np.arange(count)
    return sources, before
