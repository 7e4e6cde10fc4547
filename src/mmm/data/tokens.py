"""Batches of tokens: the global batch of step k depends on (seed, k, global batch size) alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mmm.errors import DataError


@dataclass(frozen=True)
class Batch:
    """A local batch.

    Attributes:
        inputs, targets: (batch, seq) int64; a target is the token after its input.
        count: targets in the global batch: the divisor of a sum of losses.
    """

    inputs: Tensor
    targets: Tensor
    count: int

    def to(self, device: torch.device) -> Batch:
        """On the device. The host does not wait for the copy to CUDA or XPU, which is made from pinned memory."""
        inputs, targets = self.inputs, self.targets
        if pinned := device.type in ("cuda", "xpu"):
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return Batch(inputs.to(device, non_blocking=pinned), targets.to(device, non_blocking=pinned), self.count)


class Tokens(ABC):
    """Sequences of ``seq_length + 1`` tokens, in an order that depends on a seed.

    Attributes:
        samples: sequences in one epoch.
    """

    samples: int

    def __init__(self, seq_length: int, seed: int) -> None:
        self.seq_length, self.seed = seq_length, seed

    @abstractmethod
    def sample(self, epoch: int, place: int) -> np.ndarray:
        """Sequence number `place` of an epoch, from 0: (seq_length + 1,) int64."""

    def steps_per_epoch(self, global_batch: int) -> int:
        """Steps of `global_batch` samples in an epoch; a remainder at its end is dropped.

        Raises:
            DataError: there are fewer samples than one global batch.
        """
        if self.samples < global_batch:
            raise DataError(
                f"the data has {self.samples} sequences of {self.seq_length} tokens, fewer than one global batch of "
                f"{global_batch}: use a smaller batch, a smaller --seq_length, or more text"
            )
        return self.samples // global_batch

    def batch(self, step: int, global_batch: int, first_sample: int, size: int) -> Batch:
        """Samples first_sample … first_sample + size - 1 of the global batch of a step.

        Args:
            step: from 0, over all epochs.
            first_sample, size: the local batch of data-parallel coordinate c starts at ``c * size``.
        """
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch(global_batch))
        begin = step_of_epoch * global_batch + first_sample
        rows = torch.from_numpy(np.stack([self.sample(epoch, begin + i) for i in range(size)]))  # (size, seq + 1)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), global_batch * self.seq_length)


class TextTokens(Tokens):
    """The bytes of a text as sequences that do not overlap; every epoch has each of them once, in an order of its own.

    Args:
        text: (bytes,) uint8. seq_length: tokens a sample. shuffle: False reads in order.

    Raises:
        DataError: the text is shorter than one sample.
    """

    def __init__(self, text: np.ndarray, seq_length: int, seed: int, shuffle: bool = True) -> None:
        super().__init__(seq_length, seed)
        self.text, self.shuffle = text, shuffle
        self.samples = max(len(text) - 1, 0) // seq_length
        if self.samples < 1:
            raise DataError(
                f"a text of {len(text)} bytes is too short for --seq_length {seq_length}: it needs {seq_length + 1}"
            )

    def sample(self, epoch: int, place: int) -> np.ndarray:
        number = int(epoch_order(self.seed, epoch, self.samples)[place]) if self.shuffle else place
        begin = number * self.seq_length
        return self.text[begin : begin + self.seq_length + 1].astype(np.int64)


def stream(seed: int, *place: int) -> list[int]:
    """The 32-bit words that seed ``RandomState``: the seed's lower half, `place`, the upper half if it is not 0.

    Args:
        seed: of 64 bits. place: which stream of that seed.
    """
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    return [low, *place, high] if high else [low, *place]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch's samples. ``RandomState`` is the generator whose stream NumPy promises never to change."""
    return np.random.RandomState(stream(seed, epoch)).permutation(samples)


class RandomTokens(Tokens):
    """Uniform random tokens in 0 … vocab_size - 1: ln(vocab_size) is the best loss. For measuring speed."""

    samples = 16_384

    def __init__(self, vocab_size: int, seq_length: int, seed: int) -> None:
        super().__init__(seq_length, seed)
        self.vocab_size = vocab_size

    def sample(self, epoch: int, place: int) -> np.ndarray:
        state = np.random.RandomState(stream(self.seed, epoch, place))
        return state.randint(0, self.vocab_size, size=self.seq_length + 1, dtype=np.int64)
