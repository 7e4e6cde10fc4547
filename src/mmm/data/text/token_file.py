"""Tokens on disk, of four kinds, read as they are.

*A folder of* ``mmm tokens``: ``tokens.bin``, little-endian unsigned integers without a header; ``documents.bin``,
int64, the number of tokens before the end of each document; the tokenizer's file; ``manifest.json``, written last.

*nanoGPT's* ``.bin``: integers without a header; a flag says their type. Beside ``train.bin``, ``val.bin`` is the
validation text.
Source: github.com/karpathy/nanoGPT, data/shakespeare/prepare.py.

*llm.c's* ``.bin``, which modded-nanogpt has as well: 256 int32, little-endian, of which the first are a magic number, a
version and the number of tokens; then the tokens. 20240520, version 1: uint16; 20240801, version 7: uint32.
Source: github.com/karpathy/llm.c, dev/data/data_common.py.

*Megatron's* ``.bin`` with ``.idx`` (``MMapIndexedDataset``): the tokens without a header, and an index, little-endian:

    bytes  0 …  8    "MMIDIDX\\0\\0"
           9 … 16    uint64: version, 1
               17    uint8: type of a token, 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
          18 … 25    uint64: sequences S
          26 … 33    uint64: D, one more than there are documents
    then             int32[S]: tokens of each sequence
                     int64[S]: byte of the .bin where each sequence begins; one follows the other
                     int64[D]: the first sequence of each document, and S

Source: github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import copy
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.corpus import Corpus
from mmm.data.text.formats import HEAD, check_magic, reading
from mmm.data.text.tokenizer import load_tokenizer
from mmm.data.text.tokens import TokenArray
from mmm.errors import DataError
from mmm.outside import is_plain_name, open_file, read_json

TOKENS = "tokens.bin"
DOCUMENTS = "documents.bin"
MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest
_MEGATRON_MAGIC = b"MMIDIDX\0\0" + struct.pack("<Q", 1)  # and the version
_MEGATRON_HEAD = 34  # bytes
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLMC_HEADER = 1024  # bytes
_LLMC_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by magic number and version
_ENDS = 1 << 20  # bytes of each end of a file that its fingerprint reads


class TokenFile:
    """A file of tokens, or a part of it: its length, and slices. Nothing of it stays in memory.

    Args:
        dtype: of a token. begin: of the first one, in tokens from the file's begin, a header among them.

    Raises:
        DataError: the file cannot be read, or does not end with a full token.
    """

    def __init__(self, path: Path, dtype: np.dtype, begin: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.begin = begin
        with reading(path):
            self._file = open_file(path)
        size = os.fstat(self._file.fileno()).st_size
        if size % self.dtype.itemsize:
            raise DataError(f"{path} is truncated: {size} bytes are no number of tokens of {self.dtype.itemsize} bytes")
        self.end = size // self.dtype.itemsize

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of these tokens."""
        begin, end, _ = part.indices(len(self))
        count = max(end - begin, 0)
        content = os.pread(self._file.fileno(), count * self.dtype.itemsize, (self.begin + begin) * self.dtype.itemsize)
        tokens = np.frombuffer(content, self.dtype)
        if len(tokens) != count:  # one read has 2 GiB at most
            raise DataError(f"{self.path}: {len(tokens)} of {count} tokens from {begin} on were read")
        return tokens

    def split(self) -> tuple[TokenFile, TokenFile]:
        """For training, and the last tenth for validation, as of a text."""
        train = copy.copy(self)
        validation = copy.copy(self)
        train.end = validation.begin = self.end - max(len(self) // 10, 1)
        return train, validation


def open_tokens(path: Path, token_dtype: str | None = None) -> Corpus | None:
    """Open what is at `path`: a folder of ``mmm tokens``, a ``.bin``, an ``.idx`` or what they have in common.

    Args:
        token_dtype: of a ``.bin`` without a header, such as ``uint16``.

    Returns:
        None if it is none of these, so that it is text.

    Raises:
        DataError: it is broken, unfinished, or of another version.
    """
    if path.is_dir():
        return _open_folder(path)
    suffix = path.suffix.lower()
    if suffix in (".bin", ".idx"):
        index = path.with_suffix(".idx")
    elif path.exists():
        return None
    else:
        index = path.with_name(path.name + ".idx")
    if index.is_file():
        return _open_megatron(index)
    return _open_bin(path, token_dtype) if suffix == ".bin" else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder of ``mmm tokens`` says of itself. Raises DataError: it cannot be read, or is of another version."""
    manifest = read_json(folder / MANIFEST, DataError, name=f"{folder}: no folder of mmm tokens: {MANIFEST}")
    version = manifest.get("format")
    if version != FORMAT:
        raise DataError(f"{folder} has format {version!r} of mmm tokens, and this mmm reads {FORMAT}")
    return manifest


def _open_folder(folder: Path) -> Corpus:
    manifest = read_manifest(folder)
    try:
        file = manifest["tokenizer"]["file"]
        sha256 = manifest["tokenizer"]["sha256"]
        total = manifest["tokens"]
        digest = manifest["sha256"]
        dtype = np.dtype(manifest["dtype"])
        bytes_per_token = manifest["bytes"] / total if "bytes" in manifest else None
        if dtype.kind not in "ui" or (file and not is_plain_name(file)):
            raise ValueError(f"tokens of type {dtype}, by {file!r}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {error!r}") from None
    tokens = TokenFile(folder / TOKENS, dtype)
    ends = TokenFile(folder / DOCUMENTS, np.dtype("<i8"))
    if len(tokens) != total:
        raise DataError(f"{tokens.path} is truncated: it has {len(tokens)} tokens, not {total}")
    if not len(ends) or ends[len(ends) - 1 :].tolist() != [total]:
        raise DataError(f"{ends.path} is not of the {total} tokens beside it: prepare it again")
    tokenizer: Tokenizer = load_tokenizer(folder / file) if file else ByteTokenizer()
    if tokenizer.sha256 != sha256:
        raise DataError(f"{folder / file} is not the tokenizer that made {tokens.path}: prepare it again")
    return _corpus(
        tokens,
        source=str(folder),
        sha256=digest,
        tokenizer=tokenizer,
        documents=lambda: ends,
        bytes_per_token=bytes_per_token,
    )


def _open_bin(path: Path, token_dtype: str | None) -> Corpus:
    """A ``.bin`` without an index: llm.c's by its header, else nanoGPT's."""
    tokens = _bin_tokens(path, token_dtype)
    other = path.with_name("val.bin")
    if path.name == "train.bin" and other.is_file():
        held_out = _bin_tokens(other, token_dtype)
        return Corpus(tokens, held_out, f"{path}, {other}", 2, _fingerprint(path, other), "tokens")
    return _corpus(tokens, source=str(path), sha256=_fingerprint(path))


def _bin_tokens(path: Path, token_dtype: str | None) -> TokenFile:
    """Raises DataError: it is of another format, is not as long as its header says, or nothing says what type its
    tokens have."""
    with reading(path), open_file(path) as file:
        head = file.read(HEAD)
    check_magic(path, head)
    magic, version, count = struct.unpack("<iii", head[:12].ljust(12, b"\0"))
    if (magic, version) in _LLMC_TYPES:
        dtype = np.dtype(_LLMC_TYPES[magic, version])
        if token_dtype not in (None, dtype.name):
            raise DataError(f"{path}: --token_dtype is {token_dtype}, and its header says {dtype.name}")
        tokens = TokenFile(path, dtype, _LLMC_HEADER // dtype.itemsize)
        size = tokens.end - tokens.begin
        if size != count:
            raise DataError(f"{path} has {size} tokens, and its header says {count}: it is truncated, or damaged")
        return tokens
    if token_dtype is None:
        raise DataError(
            f"{path} has no header, and so does not say what type its tokens have: say it by --token_dtype, such "
            f"as uint16, which nanoGPT writes"
        )
    return TokenFile(path, np.dtype(token_dtype).newbyteorder("<"))


def _open_megatron(index: Path) -> Corpus:
    with reading(index), open_file(index) as file:
        head = file.read(_MEGATRON_HEAD)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _MEGATRON_HEAD or not head.startswith(_MEGATRON_MAGIC):
        raise DataError(f"{index} does not begin with MMIDIDX and version 1, as Megatron's MMapIndexedDataset does")
    code, sequences, documents = struct.unpack("<BQQ", head[len(_MEGATRON_MAGIC) :])
    if code not in _MEGATRON_TYPES:
        raise DataError(f"{index} has tokens of type {code}, which is no integer type of Megatron's index")
    needed = _MEGATRON_HEAD + 12 * sequences + 8 * documents
    if not sequences or not documents or needed > size:
        raise DataError(f"{index} is truncated: {sequences} sequences and {documents} ends need {needed} bytes")
    tokens = TokenFile(index.with_suffix(".bin"), np.dtype(_MEGATRON_TYPES[code]))
    # Not read: an index may have gigabytes.
    sizes = np.memmap(index, "<i4", "r", _MEGATRON_HEAD, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _MEGATRON_HEAD + 4 * sequences, (sequences,))
    firsts = np.memmap(index, "<i8", "r", _MEGATRON_HEAD + 12 * sequences, (documents,))  # sequence of each document
    total = int(pointers[-1]) // tokens.dtype.itemsize + int(sizes[-1])
    if total != len(tokens):
        raise DataError(f"{tokens.path} has {len(tokens)} tokens, and its index {total}: it is truncated, or another's")

    def ends() -> TokenArray:
        starts = np.append(pointers // tokens.dtype.itemsize, total)
        try:
            return starts[firsts[1:]]
        except IndexError:
            raise DataError(f"{index} is damaged: a document ends with a sequence that it has not") from None

    sha256 = _fingerprint(index, tokens.path)
    return _corpus(tokens, source=str(tokens.path), sha256=sha256, documents=ends)


def _corpus(tokens: TokenFile, **fields: Any) -> Corpus:
    """A corpus of one file. Its last tenth is for validation."""
    if len(tokens) < 2:
        raise DataError(f"--text {fields['source']} has {len(tokens)} tokens: it needs 2 at least")
    train, validation = tokens.split()
    return Corpus(train, validation, files=1, unit="tokens", **fields)


def _fingerprint(*paths: Path) -> str:
    """A hash of the sizes of files and their first and last MiB: they may have terabytes, and every rank asks at the
    start."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(b"%d\n" % size + file.read(_ENDS))
            file.seek(max(size - _ENDS, 0))
            digest.update(file.read(_ENDS))
        digests.append(digest.hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
