"""Files of the safetensors format: a header in JSON, then the tensors' bytes.

::

    8 bytes   N, little-endian
    N bytes   {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [begin, end]}, …, "__metadata__": {…}}
    the rest  the tensors, row-major, little-endian; offsets count from here

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from mmm.checkpoint.weights import TensorEntry, slices
from mmm.errors import CheckpointError
from mmm.outside import open_file, parse_json, printable, short

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # by bytes of an element: what carries its bits
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


class SafetensorsFile:
    """A file's tensors, to read in slices.

    Attributes:
        entries: by name.

    Raises:
        CheckpointError: it is no such file, or its tensors are not the bytes after its header, one after the other and
            to the last.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, dict[str, TensorEntry]()
        self._begin: dict[str, int] = {}
        try:
            total = path.stat().st_size
            with open_file(path) as file:
                size = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(size)) if 0 < size <= min(LARGEST_HEADER, total - 8) else None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError:
            header = None
        if header is None:
            raise CheckpointError(f"{path} is no safetensors file, or is truncated in its header")
        header.pop("__metadata__", None)
        places = sorted((*_offsets(path, name, about), name, about) for name, about in header.items())
        before = 0
        for begin, end, name, about in places:
            entry = _entry(path, name, about)
            if end - begin != entry.bytes:
                raise CheckpointError(
                    f"{path} is damaged: {short(name)} has {end - begin} bytes, and its shape {entry.bytes}"
                )
            if begin != before:
                what = "is in the bytes of another tensor" if begin < before else "does not follow the tensor before it"
                raise CheckpointError(f"{path} is damaged: {short(name)} {what}")
            self.entries[name], self._begin[name], before = entry, 8 + size + begin, end
        if (wanted := 8 + size + before) != total:
            what = "truncated" if wanted > total else "damaged"
            raise CheckpointError(f"{path} is {what}: it has {total:,} bytes, and its tensors end at {wanted:,}")

    def read(self, name: str, start: tuple[int, ...], length: tuple[int, ...]) -> Tensor:
        """A slice of a tensor: only its part of the file is read."""
        entry = self.entries[name]
        if not prod(length):
            return torch.empty(length, dtype=entry.dtype)
        kind = BITS[entry.dtype.itemsize]
        try:
            mapped = np.memmap(self.path, kind, "r", self._begin[name], entry.shape or (1,))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from None
        part = np.array(mapped[slices(start, length)])
        return torch.from_numpy(part).view(entry.dtype).view(length)


def _offsets(path: Path, name: str, about: Any) -> tuple[int, int]:
    """Of a tensor's first byte, and of the one after its last, as the header says it. Raises CheckpointError."""
    offsets = about.get("data_offsets") if isinstance(about, dict) else None
    if not isinstance(offsets, list) or [type(each) for each in offsets] != [int, int]:
        raise CheckpointError(f"{path} is damaged: its header says nothing that fits of {short(name)}")
    begin, end = offsets
    if not 0 <= begin <= end < 1 << 63:
        raise CheckpointError(f"{path} is damaged: {short(name)} is in the bytes {begin} to {end}")
    return begin, end


def _entry(path: Path, name: str, about: dict[str, Any]) -> TensorEntry:
    """A tensor's shape and dtype, as the header says it. Raises CheckpointError."""
    dtype, shape = about.get("dtype"), about.get("shape")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise CheckpointError(f"{path} is damaged: {short(name)} has the shape {short(shape)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointError(f"{path}: {short(name)} is of dtype {short(dtype)}, which is not one of {known}")
    return TensorEntry(tuple(shape), DTYPES[dtype])


def header_of(entries: Mapping[str, TensorEntry]) -> bytes:
    """The beginning of a file of these tensors, in this order. CheckpointError: a dtype that the format has not."""
    at, header = 0, dict[str, object]({"__metadata__": {"format": "pt"}})
    for name, entry in entries.items():
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{printable(name)} is {entry.dtype}, which safetensors has no name for")
        offsets = [at, at + entry.bytes]
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(file: BinaryIO, slabs: Iterator[Tensor]) -> None:
    """Append tensors, or slices of them along the first dim, one after the other."""
    for slab in slabs:
        file.write(slab.contiguous().view(-1).view(torch.uint8).numpy().data)
