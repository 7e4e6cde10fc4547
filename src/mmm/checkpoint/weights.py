"""A model's weights on disk, whoever has written them, read slice by slice.

::

    checkpoint of this package (`OwnWeights`) ──┐
    safetensors + config.json (`HuggingFace`) ──┼──► Weights.read(name, start, length)
    GGUF (`GGUFWeights`)                      ──┘

A rank reads its own part of each tensor, an export a few rows at a time: nobody has the full model in memory. Names,
shapes and the order of rows are those of this package's Transformer, whatever is on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmm.checkpoint.manifest import FileSum, file_sum
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import read_file

TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # names of their files, in whatever folder
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


@dataclass(frozen=True)
class Origins:
    """What is known of a model besides its sizes.

    Attributes:
        block: tokens of the longest sequence that it was trained for; None where nobody says.
        bos, eos: the tokens that begin a text, and those of which one ends it; empty where nobody says.
        tokenizer: name of the file, of `TOKENIZERS`, and its content; for bytes both are empty. None where there is
            none.
        notes: what is not taken along, for people.
    """

    block: int | None = None
    eos: tuple[int, ...] = ()
    tokenizer: tuple[str, bytes] | None = None
    notes: tuple[str, ...] = ()
    bos: tuple[int, ...] = ()


def read_tokenizer(path: Path) -> bytes:
    """Raises CheckpointError: it is no file, or too large."""
    try:
        return read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None


def about_of(origins: Origins) -> dict[str, Any]:
    """What a checkpoint's `Manifest.about` says of the model, beside its file of the tokenizer."""
    tokenizer = None if origins.tokenizer is None else origins.tokenizer[0]
    return {"block": origins.block, "bos": list(origins.bos), "eos": list(origins.eos), "tokenizer": tokenizer}


def attach(folder: Path, origins: Origins) -> dict[str, FileSum]:
    """Write the tokenizer's file into a folder; its sum, by name."""
    if origins.tokenizer is None or not origins.tokenizer[0]:
        return {}
    name, content = origins.tokenizer
    (folder / name).write_bytes(content)
    return {name: file_sum(folder / name)}


class Weights(ABC):
    """
    Attributes:
        path: for messages. sizes: fields of ``TransformerConfig``, ``rope_scaling`` as a config.json has it.
        entries: by names in the model; a tied weight once, under its first name. origins: what else is known.
    """

    path: Path
    sizes: dict[str, Any]
    entries: dict[str, TensorEntry]
    origins: Origins

    @abstractmethod
    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """A slice of a tensor, in the dtype that it has on disk, on the CPU.

        Args:
            start, length: first index and number of elements, per dim.

        Raises:
            CheckpointError: a file cannot be read.
        """

    def check(self, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with the files, where they have checksums; of every `parts`-th of them, from `part` on."""
        return None


def slices(start: Sequence[int], length: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, length, strict=True))
