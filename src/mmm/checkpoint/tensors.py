"""Describes a tensor on disk before it is read, and cuts it into slabs of a few rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

# Bytes of a tensor that are read, or written, at once.
SLAB_BYTES = 1 << 24
Shape = tuple[int, ...]
# First index and number of elements, per dim.
Slab = tuple[Shape, Shape]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's shape and its dtype on disk."""

    shape: Shape
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def slabs(self) -> Iterator[Slab]:
        """Yield start and length of slices along the first dim that together are the tensor.

        A slab has at most `SLAB_BYTES`, unless a single row is larger.
        """
        # A tensor without dims has one slab, as if it were of shape (1,).
        n_rows, *row_shape = self.shape or (1,)
        row_bytes = prod(row_shape) * self.dtype.itemsize
        rows_per_slab = max(1, SLAB_BYTES // max(1, row_bytes))
        zeros = [0] * len(row_shape)
        for first_row in range(0, n_rows, rows_per_slab):
            n = min(rows_per_slab, n_rows - first_row)
            start = (first_row, *zeros)
            length = (n, *row_shape)
            yield start, length


def slices(start: Sequence[int], length: Sequence[int]) -> tuple[slice, ...]:
    """Index a tensor by the first index and the number of elements per dim."""
    pairs = zip(start, length, strict=True)
    return tuple(slice(first, first + size) for first, size in pairs)
