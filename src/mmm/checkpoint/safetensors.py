"""Files of the safetensors format, by the library of that name: read in slices, and what is wrong said in a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmm.checkpoint.tensors import TensorEntry
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

    def mapped(self, name: str) -> Tensor:
        """A tensor in full. It may be the file's own bytes, which change with the file."""
        return self._file.get_tensor(name)

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """Read a slice of a tensor; nothing else of the file is read.

        Args:
            start, length: first index and number of elements, per dim.
        """
        if not self.entries[name].shape:
            return self.mapped(name).clone()
        pairs = zip(start, length, strict=True)
        ranges = tuple(slice(first, first + size) for first, size in pairs)
        tensor = self._file.get_slice(name)[ranges]
        # As `mapped`: a copy stays as it is.
        return tensor.clone(memory_format=torch.contiguous_format)


def refuse_pointer(path: Path, begin: bytes) -> None:
    """Raise CheckpointError if a file is only a Git LFS pointer to the file itself.

    Args:
        begin: the first bytes of the file.
    """
    if begin.startswith(POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder to get it"
        )
