"""Files of the safetensors format: read by the library of that name, and written here a slab at a time.

The library cannot write a file without all of its tensors in memory. The format::

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

from mmm.checkpoint.tensors import Shape, TensorEntry, slices
from mmm.errors import CheckpointError
from mmm.history.record.folder import reason
from mmm.outside import open_file, printable, short

# A Git LFS pointer is a small text file in place of a large one. It begins like this.
POINTER = b"version https://git-lfs.github.com/spec/"
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
    """An open file, whose tensors are read in slices.

    Attributes:
        path: the file.
        entries: shape and dtype of each tensor, by name.

    Raises:
        CheckpointError: it is not a safetensors file, or its tensors do not fill the bytes after its header without a
            gap.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Opened here first: the library would wait forever for a FIFO.
            with open_file(path) as file:
                refuse_pointer(path, file.read(len(POINTER)))
            self._file = safe_open(path, "pt")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
        except SafetensorError as error:
            text = printable(str(error))
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated or damaged: {text}") from None
        self.entries: dict[str, TensorEntry] = {}
        names = self._file.keys()
        for name in names:
            self.entries[name] = self._entry(name)

    def _entry(self, name: str) -> TensorEntry:
        # Nothing of the tensor is read yet.
        tensor = self._file.get_slice(name)
        dtype = tensor.get_dtype()
        shape = tuple(tensor.get_shape())
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: {short(name)} is of dtype {dtype}, which is not one of {known}")
        return TensorEntry(shape, DTYPES[dtype])

    def read(self, name: str, start: Shape, length: Shape) -> Tensor:
        """Read a slice of a tensor; nothing else of the file is read.

        Args:
            start, length: first index and number of elements, per dim.
        """
        if not self.entries[name].shape:
            return self._file.get_tensor(name)
        tensor = self._file.get_slice(name)
        mapped = tensor[slices(start, length)]
        # The library's tensor may be the file's own bytes, which change with the file.
        return mapped.clone(memory_format=torch.contiguous_format)


def header_of(entries: Mapping[str, TensorEntry]) -> bytes:
    """The beginning of a file that holds these tensors in this order.

    Raises:
        CheckpointError: the format does not have a tensor's dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, entry in entries.items():
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{printable(name)} is {entry.dtype}, which safetensors has no name for")
        end = begin + entry.bytes
        header[name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8 bytes, so that the tensors are aligned.
    text += b" " * (-len(text) % 8)
    size = len(text).to_bytes(8, "little")
    return size + text


def write(file: BinaryIO, slabs: Iterator[Tensor]) -> None:
    """Append tensors, or slices of them along the first dim, one after another."""
    for slab in slabs:
        # NumPy has no bfloat16, hence the view as bytes.
        flat = slab.contiguous().view(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def refuse_pointer(path: Path, begin: bytes) -> None:
    """Raise CheckpointError if a file is only a Git LFS pointer to the file itself.

    Args:
        begin: the first bytes of the file.
    """
    if begin.startswith(POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder to get it"
        )
