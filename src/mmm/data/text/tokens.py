"""Batches of tokens: the global batch of step k depends only on (seed, k, global batch size)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mmm.data.order import epoch_order, stream
from mmm.errors import DataError
from mmm.layout import PADDING
from mmm.nn.attention import Documents
from mmm.torch_private.operators import tree_map_only

# The vocabulary of a text without a tokenizer: each byte is a token.
BYTES = 256


@dataclass(frozen=True)
class Batch:
    """A local batch: a rank's tokens of one step.

    Attributes:
        inputs: (batch, seq) int64.
        targets: (batch, seq) int64; each is the token after its input, or `PADDING`.
        count: number of targets in the global batch, by which a sum of losses is divided. It is a tensor if the targets
            have been counted.
        has_padding: whether some targets may be `PADDING`. Then `count` includes them, and the divisor is the number of
            other targets, which differs from step to step.
        documents: where documents begin in the sequences. None if a sequence is one text.
        sample_keys: (batch,) int64, for models with dropout (`mmm.nn.dropout`); None for other models.
    """

    inputs: Tensor
    targets: Tensor
    count: int | Tensor
    has_padding: bool = False
    documents: Documents | None = None
    sample_keys: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Tensor | Documents]:
        """What a model's forward takes besides its inputs, (batch, …)."""
        arguments: dict[str, Tensor | Documents] = {}
        if self.documents is not None:
            arguments["documents"] = self.documents
        if self.sample_keys is not None:
            arguments["sample_keys"] = self.sample_keys
        return arguments

    def split(self, parts: int) -> list[Batch]:
        """Split into micro-batches, whose sizes differ by one sample at most."""
        tensors = {"inputs": self.inputs, "targets": self.targets, **self.arguments}
        fields: list[dict[str, Any]] = [{} for _ in range(parts)]
        for name, tensor in tensors.items():
            # Along the batch: (batch, seq) → (micro-batch, seq) each
            for fields_of_one, piece in zip(fields, tensor.tensor_split(parts), strict=True):
                fields_of_one[name] = piece
        return [replace(self, **fields_of_one) for fields_of_one in fields]

    def to(self, device: torch.device) -> Batch:
        """Copy to a device. For CUDA and XPU the copy is from pinned memory, and the host does not wait for it."""
        pinned = device.type in ("cuda", "xpu")

        def moved(tensor: Tensor) -> Tensor:
            host = tensor.pin_memory() if pinned else tensor
            return host.to(device, non_blocking=pinned)

        # `documents` has two tensors.
        fields: dict[str, Any] = tree_map_only(Tensor, moved, vars(self))
        return replace(self, **fields)


class TokenArray(Protocol):
    """A NumPy array of integers, or a file of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class Tokens(ABC):
    """Sequences of ``seq_length + 1`` tokens, in an order that depends on a seed.

    Attributes:
        samples: number of sequences in one epoch.
        targets: number of targets in these sequences, if the last global batch may have fewer than the others. None if
            all have the same number, or if they have to be counted.
        has_padding: whether some targets may be `PADDING`.
        seq_length: number of inputs in a sequence, and of targets.
        seed: seed of the order.
        shuffle: whether each epoch has an order of its own. If not, sequences keep their order, as for validation, and
            each of them counts.
    """

    samples: int
    targets: int | None = None
    has_padding: bool = False

    def __init__(self, seq_length: int, seed: int, shuffle: bool = True) -> None:
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle

    @abstractmethod
    def sample(self, epoch: int, place: int) -> np.ndarray:
        """Read the sequence at `place` of an epoch, from 0. Beyond the last one there is padding.

        Returns:
            (seq_length + 1,) int64, with `PADDING` after the end of a text. If a target is not always the next token:
            (2, seq_length), inputs and targets. With documents: (3, seq_length), inputs, targets and where each token's
            document begins.
        """

    def steps_per_epoch(self, global_batch: int) -> int:
        """The number of steps of `global_batch` samples in an epoch.

        A remainder at its end is dropped if the samples are shuffled. If not, the last batch is filled up with padding.

        Raises:
            DataError: samples are shuffled, and fewer than one global batch.
        """
        if not self.shuffle:
            return -(-self.samples // global_batch)
        if self.samples < global_batch:
            raise DataError(
                f"the data has {self.samples} sequences of {self.seq_length} tokens, fewer than one global batch of "
                f"{global_batch}: use a smaller batch, a smaller --seq_length, or more text"
            )
        return self.samples // global_batch

    def sequence_at(self, epoch: int, place: int) -> int:
        """The index of the sequence at a place of an epoch."""
        if self.shuffle:
            return self.shuffled(epoch, place)
        return place

    def shuffled(self, epoch: int, place: int) -> int:
        """`sequence_at` of a shuffled order. The order is kept as a list, which is smaller than a text in memory."""
        # (samples,)
        order = epoch_order(self.seed, epoch, self.samples)
        return int(order[place])

    def batch(self, step: int, global_batch: int, first_sample: int, size: int) -> Batch:
        """Read samples first_sample … first_sample + size - 1 of a step's global batch.

        Args:
            step: index of the step over all epochs, from 0.
            global_batch: number of samples in a step over all ranks.
            first_sample, size: the local batch. Data-parallel coordinate c starts at ``c * size``.
        """
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch(global_batch))
        begin = step_of_epoch * global_batch + first_sample
        samples = [self.sample(epoch, begin + i) for i in range(size)]
        rows = torch.from_numpy(np.stack(samples))
        if rows.ndim == 2:
            # (size, seq_length + 1): a target is the next token. Where there is none, the input is token 0.
            columns = [rows[:, :-1].clamp(min=0), rows[:, 1:]]
        else:
            # (size, 2 or 3, seq_length)
            columns = list(rows.unbind(1))
        # (size, seq_length) each
        inputs, targets, *starts = [column.contiguous() for column in columns]
        documents = None
        if starts:
            documents = Documents.of(*starts)
        count = global_batch * self.seq_length
        if self.targets is not None:
            before = step_of_epoch * count
            count = min(count, self.targets - before)
        return Batch(inputs, targets, count, self.has_padding, documents)


class TextTokens(Tokens):
    """A text as sequences that do not overlap. Every epoch has each of them once, in an order of its own.

    If they keep the order of the text, the last one may be shorter, and is filled up with padding.

    Args:
        text: (tokens,) unsigned integers.
        seq_length: number of tokens in a sample.
        seed: seed of the order.
        shuffle: if False, sequences keep the order of the text.
        unit: what the text's tokens are called in messages.

    Raises:
        DataError: the text is shorter than one sample.
    """

    def __init__(
        self,
        text: TokenArray,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        *,
        unit: str = "bytes",
    ) -> None:
        super().__init__(seq_length, seed, shuffle)
        self.text = text
        # The last token is only a target.
        inputs = len(text) - 1
        self.samples = inputs // seq_length
        if not shuffle:
            self.targets = inputs
            self.samples = -(-inputs // seq_length)
        if self.samples < 1:
            raise DataError(
                f"a text of {len(text)} {unit} is too short for --seq_length {seq_length}: it needs {seq_length + 1}"
            )

    def sample(self, epoch: int, place: int) -> np.ndarray:
        row = np.full(self.seq_length + 1, PADDING, np.int64)
        if place < self.samples:
            begin = self.sequence_at(epoch, place) * self.seq_length
            tokens = self.text[begin : begin + len(row)]
            row[: len(tokens)] = tokens
        return row


class RandomTokens(Tokens):
    """Uniform random tokens in 0 … vocab_size - 1, to measure speed. The best possible loss is ln(vocab_size)."""

    # Any number would do: it is the size of an epoch.
    samples = 16_384

    def __init__(self, vocab_size: int, seq_length: int, seed: int) -> None:
        super().__init__(seq_length, seed)
        self.vocab_size = vocab_size

    def sample(self, epoch: int, place: int) -> np.ndarray:
        state = np.random.RandomState(stream(self.seed, epoch, place))
        return state.randint(0, self.vocab_size, size=self.seq_length + 1, dtype=np.int64)
