"""Files of the safetensors format: read by the library of that name, and written a slab at a time, which it cannot.

::

    8 bytes   N, little-endian
    N bytes   {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [begin, end]}, …, "__metadata__": {…}}
    the rest  the tensors, row-major, little-endian; offsets count from here

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmm.checkpoint.tensors import TensorEntry, slices
from mmm.errors import CheckpointError
from mmm.outside import open_file, printable, short

POINTER = b"version https://git-lfs.github.com/spec/"  # how a Git LFS pointer begins
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


class SafetensorsFile:
    """A file's tensors, to read in slices.

    Attributes:
        entries: by name.

    Raises:
        CheckpointError: it is no such file, or its tensors are not the bytes after its header, one after the other and
            to the last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as file:  # the library would wait for a FIFO
                refuse_pointer(path, file.read(len(POINTER)))
            self._file = safe_open(path, "pt")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            text = printable(str(error))
            raise CheckpointError(f"{path} is no safetensors file, or is truncated or damaged: {text}") from None
        names = self._file.keys()
        self.entries = {name: self._entry(name) for name in names}

    def _entry(self, name: str) -> TensorEntry:
        tensor = self._file.get_slice(name)
        if tensor.get_dtype() not in DTYPES:
            known = ", ".join(DTYPES)
            text = f"{self.path}: {short(name)} is of dtype {tensor.get_dtype()}, which is not one of {known}"
            raise CheckpointError(text)
        return TensorEntry(tuple(tensor.get_shape()), DTYPES[tensor.get_dtype()])

    def read(self, name: str, start: tuple[int, ...], length: tuple[int, ...]) -> Tensor:
        """A slice of a tensor: only its part of the file is read."""
        if not self.entries[name].shape:
            return self._file.get_tensor(name)
        part = self._file.get_slice(name)[slices(start, length)]
        return part.clone(memory_format=torch.contiguous_format)  # not the file's bytes themselves, which may change


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


def refuse_pointer(path: Path, begin: bytes) -> None:
    """Raises CheckpointError where a file begins as one that stands for another in a Git repository."""
    if begin.startswith(POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, and not the file itself: `git lfs pull` in its folder gets that"
        )
