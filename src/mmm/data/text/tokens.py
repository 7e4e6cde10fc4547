"""Batches of tokens: the global batch of step k depends on (seed, k, global batch size) alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mmm.data.order import epoch_order, stream
from mmm.errors import DataError

BYTES = 256  # the vocabulary of a text without a tokenizer: one token a byte


@dataclass(frozen=True)
class Batch:
    """A local batch: a rank's tokens of one step.

    Attributes:
        inputs, targets: (batch, seq) int64; a target is the token after its input, or `PADDING`.
        count: targets in the global batch: the divisor of a sum of losses. A tensor where they have been counted.
        has_padding: some targets may be `PADDING`, which `count` includes: the divisor is how many are not, and differs
            from step to step.
        document_starts: (batch, seq) int64, the place in its sequence where the document of each token begins; None
            where a sequence is one text.
        sample_keys: (batch,) int64, for models with dropout (`mmm.nn.dropout`); None where there are none.
    """

    inputs: Tensor
    targets: Tensor
    count: int | Tensor
    has_padding: bool = False
    document_starts: Tensor | None = None
    sample_keys: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What a model's forward takes besides its inputs, (batch, …)."""
        named = {"document_starts": self.document_starts, "sample_keys": self.sample_keys}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def split(self, parts: int) -> list[Batch]:
        """Micro-batches, whose sizes differ by one sample at most."""
        tensors = {"inputs": self.inputs, "targets": self.targets, **self.arguments}
        pieces = zip(*(tensor.tensor_split(parts) for tensor in tensors.values()), strict=True)
        return [replace(self, **dict(zip(tensors, piece, strict=True))) for piece in pieces]

    def to(self, device: torch.device) -> Batch:
        """On the device. The host does not wait for the copy to CUDA or XPU, which is made from pinned memory."""
        pinned = device.type in ("cuda", "xpu")
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                host = value.pin_memory() if pinned else value
                moved[name] = host.to(device, non_blocking=pinned)
        return replace(self, **moved)


class TokenArray(Protocol):
    """A NumPy array of integers, or a file of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Tokens(ABC):
    """Sequences of ``seq_length + 1`` tokens, in an order that depends on a seed.

    Attributes:
        samples: sequences in one epoch.
        has_padding: as of `Batch`.
    """

    samples: int
    has_padding: bool = False

    def __init__(self, seq_length: int, seed: int, shuffle: bool = True) -> None:
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle

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

    def number(self, epoch: int, place: int) -> int:
        """Which of the sequences is at a place of an epoch."""
        return self.shuffled(epoch, place) if self.shuffle else place

    def shuffled(self, epoch: int, place: int) -> int:
        """`number` by a list of all, which is smaller than a text in memory."""
        return int(epoch_order(self.seed, epoch, self.samples)[place])

    def batch(self, step: int, global_batch: int, first_sample: int, size: int) -> Batch:
        """Samples first_sample … first_sample + size - 1 of the global batch of a step.

        Args:
            step: from 0, over all epochs.
            first_sample, size: the local batch of data-parallel coordinate c starts at ``c * size``.
        """
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch(global_batch))
        begin = step_of_epoch * global_batch + first_sample
        rows = torch.from_numpy(np.stack([self.sample(epoch, begin + i) for i in range(size)]))
        if rows.ndim == 2:  # (size, seq_length + 1)
            columns = [rows[:, :-1], rows[:, 1:]]
        else:  # (size, 2 or 3, seq_length)
            columns = list(rows.unbind(1))
        inputs, targets, *starts = (column.contiguous() for column in columns)  # (size, seq_length) each
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
        super().__init__(seq_length, seed, shuffle)
        self.text = text
        self.samples = max(len(text) - 1, 0) // seq_length
        if self.samples < 1:
            raise DataError(
                f"a text of {len(text)} {unit} is too short for --seq_length {seq_length}: it needs {seq_length + 1}"
            )

    def sample(self, epoch: int, place: int) -> np.ndarray:
        begin = self.number(epoch, place) * self.seq_length
        return self.text[begin : begin + self.seq_length + 1].astype(np.int64)


class RandomTokens(Tokens):
    """Uniform random tokens in 0 … vocab_size - 1: ln(vocab_size) is the best loss. For measuring speed."""

    samples = 16_384

    def __init__(self, vocab_size: int, seq_length: int, seed: int) -> None:
        super().__init__(seq_length, seed)
        self.vocab_size = vocab_size

    def sample(self, epoch: int, place: int) -> np.ndarray:
        state = np.random.RandomState(stream(self.seed, epoch, place))
        return state.randint(0, self.vocab_size, size=self.seq_length + 1, dtype=np.int64)
