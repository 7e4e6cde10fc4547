"""GGUF files, as llama.cpp writes them: keys and tensors, in one file or in parts, dequantized as they are read.

::

    "GGUF"  version  tensors  keys     uint32, uint32, uint64, uint64
    key, type, value                   for each key: a string, uint32, and what the type says
    name, dims, shape, type, offset    for each tensor: the innermost dim first
    …                                  the tensors, each on a multiple of general.alignment; offsets count from here

Sources: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; for parts, gguf-split of llama.cpp. What a quantized
block means, the package gguf knows.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmm.errors import CheckpointError
from mmm.outside import MOST_VALUES, open_file, short
from mmm.weights.weights import TensorEntry

LARGEST_HEADER = 100_000_000  # bytes
MAGIC, VERSIONS, STRING, ARRAY = b"GGUF", (2, 3), 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
PLAIN = {  # by type of tensor
    0: (torch.float32, np.int32),
    1: (torch.float16, np.int16),
    30: (torch.bfloat16, np.int16),
}
PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)  # name of one of several files


class GGUFFile:
    """A file's keys, and its tensors to read in slices.

    Attributes:
        keys: their values, by name. entries: the tensors, by name; of float32 where they are quantized.

    Raises:
        CheckpointError: it is no such file, or truncated; or the package gguf is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, Any] = {}
        self.entries: dict[str, TensorEntry] = {}
        self._tensors: dict[str, tuple[int, int, int]] = {}  # type, first byte, bytes of a row
        try:
            with open_file(path) as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = self._values = 0
            self._header()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except (struct.error, OverflowError, MemoryError, RecursionError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is no GGUF file, or is truncated in its header") from None

    def _header(self) -> None:
        if self._bytes[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it does not begin with GGUF")
        self._at = 4
        version, tensors, keys = self._take("I"), self._take("Q"), self._take("Q")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is of GGUF's version {version}, and 2 and 3 are known")
        for _ in range(keys):
            key = self._name()
            self.keys[key] = self._value(self._take("I"))
        found = []
        for _ in range(tensors):
            name = self._name()
            shape = tuple(self._take("Q") for _ in range(self._take("I")))[::-1]
            found.append((name, shape, self._take("I"), self._take("Q")))
            if self._at > LARGEST_HEADER:
                raise ValueError
        aligned = self.keys.get("general.alignment", 32)
        if type(aligned) is not int or aligned < 1 or aligned & (aligned - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {short(aligned)}, and has to be a power of 2")
        begin = -(-self._at // aligned) * aligned
        for name, shape, kind, offset in found:
            elements, size = self._block(name, kind)
            if name in self.entries:
                raise CheckpointError(f"{self.path} has the tensor {name} twice")
            if not shape or shape[-1] % elements:
                raise CheckpointError(f"{self.path}: {name} has rows of {shape[-1:]}, not of blocks of {elements}")
            row = shape[-1] // elements * size
            if offset % aligned:
                raise CheckpointError(f"{self.path} is damaged: {name} is on no multiple of {aligned} bytes")
            if begin + offset + prod(shape[:-1]) * row > len(self._bytes):
                raise CheckpointError(
                    f"{self.path} is truncated: {len(self._bytes):,} bytes end before those of {name}"
                )
            dtype = PLAIN[kind][0] if kind in PLAIN else torch.float32
            self.entries[name], self._tensors[name] = TensorEntry(shape, dtype), (kind, begin + offset, row)
        self._check_apart()

    def _check_apart(self) -> None:
        """Raises CheckpointError where two tensors have bytes in common."""
        last, end = "", 0
        for name, (_, begin, row) in sorted(self._tensors.items(), key=lambda item: item[1][1]):
            if (size := prod(self.entries[name].shape[:-1]) * row) and begin < end:
                raise CheckpointError(f"{self.path} is damaged: {last} and {name} have bytes in common")
            last, end = (name, begin + size) if size else (last, end)

    def _name(self) -> str:
        name = self._value(STRING)
        if not name.isprintable():
            raise CheckpointError(f"{self.path} has the name {short(name)}: names are of printable characters")
        return name

    def _take(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            size = self._take("Q")
            self._at += size
            if self._at > min(len(self._bytes), LARGEST_HEADER):
                raise ValueError
            return self._bytes[self._at - size : self._at].decode()
        if kind != ARRAY:
            return self._take(SCALARS[kind])
        kind, size = self._take("I"), self._take("Q")
        self._values += size
        if self._values > MOST_VALUES:
            raise ValueError
        if kind in SCALARS:
            values = struct.unpack_from(f"<{size}{SCALARS[kind]}", self._bytes, self._at)
            self._at += struct.calcsize(f"<{size}{SCALARS[kind]}")
            return list(values)
        return [self._value(kind) for _ in range(size)]

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        """Elements and bytes of a block."""
        if kind in PLAIN:
            return 1, PLAIN[kind][0].itemsize
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"{self.path} is quantized, which needs the package gguf, which is not installed: pip install "
                "'mmm[gguf]'"
            ) from None
        try:
            self._kinds = gguf.GGMLQuantizationType
            self._dequantize = gguf.quants.dequantize
            return gguf.GGML_QUANT_SIZES[self._kinds(kind)]
        except (KeyError, ValueError):
            raise CheckpointError(f"{self.path}: {name} is quantized as type {kind}, which is not known") from None

    def read(self, name: str, start: Sequence[int], length: Sequence[int]) -> Tensor:
        """A slice of a tensor, as `Weights.read`."""
        kind, begin, row = self._tensors[name]
        if not prod(length):
            return torch.empty(tuple(length), dtype=self.entries[name].dtype)
        first, many = (start[0], length[0]) if len(self.entries[name].shape) > 1 else (0, 1)
        part = np.frombuffer(self._bytes, np.uint8, many * row, begin + first * row).reshape(many, row)
        if kind in PLAIN:
            dtype, bits = PLAIN[kind]
            found = torch.from_numpy(part.copy().view(bits)).view(dtype)
        else:
            found = torch.from_numpy(self._dequantize(part, self._kinds(kind)))
        return found[:, start[-1] : start[-1] + length[-1]].reshape(tuple(length)).contiguous()


def open_parts(path: Path) -> list[GGUFFile]:
    """A file; or the parts of a model that gguf-split has written, of which the first has the keys.

    Args:
        path: of the file, or of any of the parts.

    Raises:
        CheckpointError: as `GGUFFile`; or a part is missing, is of another model, or has a tensor of another part.
    """
    given = GGUFFile(path)
    parts = given.keys.get("split.count", 1)
    if type(parts) is not int or parts <= 1:
        return [given]
    name = PART.fullmatch(path.name)
    if name is None or int(name[2]) != parts:
        raise CheckpointError(f"{path} is one of {parts} parts, whose names have to end in -00001-of-{parts:05}.gguf")
    paths = [path.with_name(f"{name[1]}-{number:05}-of-{parts:05}.gguf") for number in range(1, parts + 1)]
    if missing := [other for other in paths if not other.exists()]:
        raise CheckpointError(f"{missing[0]} is missing: {path.name} is one of {parts} parts")
    files = [GGUFFile(other) for other in paths]
    seen: dict[str, Path] = {}
    for number, file in enumerate(files):
        own = tuple(file.keys.get(key) for key in ("split.no", "split.count"))
        if own != (number, parts):
            raise CheckpointError(f"{file.path}: split.no and split.count are {own}, and by its name {number, parts}")
        for tensor in file.entries:
            if tensor in seen:
                raise CheckpointError(f"the tensor {tensor} is in {seen[tensor]} and in {file.path}")
            seen[tensor] = file.path
    if (count := files[0].keys.get("split.tensors.count", len(seen))) != len(seen):
        raise CheckpointError(f"{files[0].path} says {count} tensors in all parts, and there are {len(seen)}")
    return files
