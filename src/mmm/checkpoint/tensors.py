"""What is known of a tensor on disk before it is read, and how it is read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

ROWS = 1 << 24  # bytes of a tensor that are read, or written, at once


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's shape, and its dtype on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def slabs(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The tensor as slices along its first dim, of `ROWS` bytes at most where a row is no larger: start and length
        of each."""
        first, *rest = self.shape or (1,)
        step = max(1, ROWS // max(1, prod(rest) * self.dtype.itemsize))
        for start in range(0, first, step):
            yield (start, *[0] * len(rest)), (min(step, first - start), *rest)


def slices(start: Sequence[int], length: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, length, strict=True))
