"""Batches of tokens: the global batch of step k depends on (seed, k, global batch size) alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmm.data.order import permuted
from mmm.data.text import TokenArray
from mmm.data.token_file import TokenFile
from mmm.errors import ConfigError, DataError


@dataclass(frozen=True)
class Batch:
    """A local batch.

    Attributes:
        inputs, targets: (batch, seq) int64; a target is the token after its input, or `PADDING`.
        count: targets in the global batch: the divisor of a sum of losses.
        has_padding: some targets may be `PADDING`, which `count` includes: the divisor is how many are not, and differs
            from step to step.
        document_starts: (batch, seq) int64, the place in its sequence where the document of each token begins; None
            where a sequence is one text.
        sample_keys: (batch,) int64, for models with dropout (`mmm.models.dropout`); None where there are none.
    """

    inputs: Tensor
    targets: Tensor
    count: int
    has_padding: bool = False
    document_starts: Tensor | None = None
    sample_keys: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """On the device. The host does not wait for the copy to CUDA or XPU, which is made from pinned memory."""
        tensors = [self.inputs, self.targets, *([] if self.document_starts is None else [self.document_starts])]
        if pinned := device.type in ("cuda", "xpu"):
            tensors = [tensor.pin_memory() for tensor in tensors]
        inputs, targets, *starts = (tensor.to(device, non_blocking=pinned) for tensor in tensors)
        return Batch(inputs, targets, self.count, self.has_padding, *starts)


class Tokens(ABC):
    """Sequences of ``seq_length + 1`` tokens, in an order that depends on a seed.

    Attributes:
        samples: sequences in one epoch.
        has_padding: as of `Batch`.
    """

    samples: int
    has_padding: bool = False

    def __init__(self, seq_length: int, seed: int) -> None:
        self.seq_length, self.seed = seq_length, seed

    @abstractmethod
    def sample(self, epoch: int, place: int) -> np.ndarray:
        """Sequence number `place` of an epoch, from 0: (seq_length + 1,) int64; where a target is not always the next
        token, (2, seq_length), inputs and targets; with documents (3, seq_length), also where each token's begins."""

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

    def begin(self, step: int, global_batch: int) -> tuple[int, int]:
        """Epoch and place of the first sample of a step."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch(global_batch))
        return epoch, step_of_epoch * global_batch

    def batch(self, step: int, global_batch: int, first_sample: int, size: int) -> Batch:
        """Samples first_sample … first_sample + size - 1 of the global batch of a step.

        Args:
            step: from 0, over all epochs.
            first_sample, size: the local batch of data-parallel coordinate c starts at ``c * size``.
        """
        epoch, begin = self.begin(step, global_batch)
        begin += first_sample
        rows = torch.from_numpy(np.stack([self.sample(epoch, begin + i) for i in range(size)]))
        parts = (rows[:, :-1], rows[:, 1:]) if rows.ndim == 2 else rows.unbind(1)  # each (size, seq)
        inputs, targets, *starts = (part.contiguous() for part in parts)
        return Batch(inputs, targets, global_batch * self.seq_length, self.has_padding, *starts)


class TextTokens(Tokens):
    """A text as sequences that do not overlap; every epoch has each of them once, in an order of its own.

    Args:
        text: (tokens,) unsigned integers. seq_length: tokens a sample. shuffle: False reads in order.
        unit: what the text's tokens are called.

    Raises:
        DataError: the text is shorter than one sample.
    """

    def __init__(
        self, text: TokenArray, seq_length: int, seed: int, shuffle: bool = True, *, unit: str = "bytes"
    ) -> None:
        super().__init__(seq_length, seed)
        self.text, self.shuffle = text, shuffle
        self.samples = max(len(text) - 1, 0) // seq_length
        if self.samples < 1:
            raise DataError(
                f"a text of {len(text)} {unit} is too short for --seq_length {seq_length}: it needs {seq_length + 1}"
            )

    def shuffled(self, epoch: int, place: int) -> int:
        """Which sample of the text is at a place of an epoch, from a list, which is smaller than a text in memory."""
        return int(epoch_order(self.seed, epoch, self.samples)[place])

    def first_token(self, epoch: int, place: int) -> int:
        """Where in the text a sample begins."""
        return (self.shuffled(epoch, place) if self.shuffle else place) * self.seq_length

    def sample(self, epoch: int, place: int) -> np.ndarray:
        begin = self.first_token(epoch, place)
        return self.text[begin : begin + self.seq_length + 1].astype(np.int64)


class FileTokens(TextTokens):
    """As `TextTokens`, of a file of tokens that may have 10¹² of them: the order is computed, place by place.

    Args:
        vocab_size: of the model: a token that it lacks is refused when it is read.

    Raises:
        DataError: as of `TextTokens`; the first or the last sample has a token that the vocabulary lacks.
    """

    def __init__(
        self, text: TokenFile, seq_length: int, seed: int, shuffle: bool = True, *, vocab_size: int = 1 << 63
    ) -> None:
        super().__init__(text, seq_length, seed, shuffle, unit="tokens")
        self.path, self.vocab_size = text.path, vocab_size
        for number in (0, self.samples - 1):
            check_vocabulary(self.path, text[number * seq_length : (number + 1) * seq_length], vocab_size)

    def shuffled(self, epoch: int, place: int) -> int:
        return permuted(place, self.samples, self.seed, epoch)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        row = super().sample(epoch, place)
        check_vocabulary(self.path, row, self.vocab_size)
        return row


def check_vocabulary(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataError where tokens of a file are not in the vocabulary."""
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"{path} has token {token}, and the model's vocabulary ends at {vocab_size - 1}: "
                f"give the --tokenizer that made the file, or its --vocab_size"
            )


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
        return self.sources[source].sample(*divmod(count, self.sources[source].samples))


@lru_cache(maxsize=4)
def _block(seed: int, block: int, quota: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample of a block its source, and how many of that source come before it in the block."""
    state = np.random.RandomState(stream(seed, block & 0xFFFFFFFF, block >> 32, 1))
    sources = state.permutation(np.repeat(np.arange(len(quota)), quota))
    before = np.empty_like(sources)
    for source, count in enumerate(quota):
        before[sources == source] = np.arange(count)
    return sources, before


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
