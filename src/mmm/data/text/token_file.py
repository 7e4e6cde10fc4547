"""Tokens on disk, read as they are. There are four kinds of files.

*A folder of* ``mmm tokens``: ``tokens.bin``, little-endian unsigned integers without a header; ``documents.bin``,
int64, the number of tokens before the end of each document; the tokenizer's file; ``manifest.json``, written last.

*nanoGPT's* ``.bin``: integers without a header; a flag says their type. A ``val.bin`` next to ``train.bin`` is the
validation text.
Source: github.com/karpathy/nanoGPT, data/shakespeare/prepare.py.

*llm.c's* ``.bin``, which modded-nanogpt uses too: 256 int32, little-endian, of which the first three are a magic
number, a version and the number of tokens; then the tokens. 20240520, version 1: uint16; 20240801, version 7: uint32.
Source: github.com/karpathy/llm.c, dev/data/data_common.py.

*Megatron's* ``.bin`` with ``.idx`` (``MMapIndexedDataset``): the tokens without a header, and an index, little-endian:

    bytes  0 …  8    "MMIDIDX\\0\\0"
           9 … 16    uint64: version, 1
               17    uint8: type of a token, 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
          18 … 25    uint64: S, number of sequences
          26 … 33    uint64: D, number of documents plus one
    then             int32[S]: number of tokens in each sequence
                     int64[S]: byte of the .bin where each sequence begins; one follows another
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

from mmm.checkpoint.model_metadata import ChatFormat
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
# Version of the manifest's format.
FORMAT = 1
# Every index begins with this: its name, and version 1.
_MEGATRON_MAGIC = b"MMIDIDX\0\0" + struct.pack("<Q", 1)
# Bytes before the index's arrays.
_MEGATRON_HEAD = 34
# 6 and 7 are floating-point.
_MEGATRON_TYPES = {
    1: "u1",
    2: "i1",
    3: "<i2",
    4: "<i4",
    5: "<i8",
    8: "<u2",
}
# Size of the header in bytes.
_LLMC_HEADER = 1024
# Type of a token by magic number and version.
_LLMC_TYPES = {
    (20240520, 1): "<u2",
    (20240801, 7): "<u4",
}
# Bytes at each end of a file that its fingerprint reads.
_ENDS = 1 << 20


class TokenFile:
    """A file of tokens, or a stretch of one. It has a length and gives slices; none of it stays in memory.

    Args:
        path: the file.
        dtype: type of a token.
        begin: index of the first token; a header before it counts as tokens.

    Attributes:
        end: index after the last token, in the file.

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
        token_bytes = self.dtype.itemsize
        if size % token_bytes:
            raise DataError(f"{path} is truncated: {size} bytes are not a whole number of {token_bytes}-byte tokens")
        self.end = size // token_bytes

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: slice) -> np.ndarray:
        """A copy of these tokens."""
        begin, end, _ = index.indices(len(self))
        count = max(end - begin, 0)
        token_bytes = self.dtype.itemsize
        # pread has no position of its own: threads and forked processes may share the file.
        offset = (self.begin + begin) * token_bytes
        content = os.pread(self._file.fileno(), count * token_bytes, offset)
        tokens = np.frombuffer(content, self.dtype)
        # The system reads at most 2 GiB at once.
        if len(tokens) != count:
            raise DataError(f"{self.path}: {len(tokens)} of {count} tokens from {begin} on were read")
        return tokens

    def split(self) -> tuple[TokenFile, TokenFile]:
        """Split off the last tenth for validation, as for a text."""
        edge = self.end - max(len(self) // 10, 1)
        train = copy.copy(self)
        train.end = edge
        validation = copy.copy(self)
        validation.begin = edge
        return train, validation


def open_tokens(path: Path, token_dtype: str | None = None) -> Corpus | None:
    """Open a folder of ``mmm tokens``, a ``.bin``, or an ``.idx``.

    Args:
        token_dtype: type of a token in a ``.bin`` without a header, such as ``uint16``.

    Returns:
        None if it is none of these, so that it is text.

    Raises:
        DataError: it is broken, unfinished, or of another version.
    """
    if path.is_dir():
        return _open_folder(path)
    suffix = path.suffix.lower()
    if suffix not in (".bin", ".idx"):
        return None
    index = path.with_suffix(".idx")
    if suffix == ".idx" or index.is_file():
        return _open_megatron(index)
    return _open_bin(path, token_dtype)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest. Raises DataError: it cannot be read, or is of another version."""
    name = f"{folder} is not a folder of mmm tokens: {MANIFEST}"
    manifest = read_json(folder / MANIFEST, DataError, name=name)
    version = manifest.get("format")
    if version != FORMAT:
        raise DataError(f"{folder} has format {version!r} of mmm tokens, and this mmm reads {FORMAT}")
    return manifest


def _open_folder(folder: Path) -> Corpus:
    manifest = read_manifest(folder)
    try:
        tokenizer_file = manifest["tokenizer"]["file"]
        tokenizer_sha256 = manifest["tokenizer"]["sha256"]
        eos = manifest["tokenizer"].get("eos")
        total = manifest["tokens"]
        sha256 = manifest["sha256"]
        dtype = np.dtype(manifest["dtype"])
        bytes_per_token = manifest["bytes"] / total
        if dtype.kind not in "ui":
            raise ValueError(f"tokens of type {dtype}")
        if tokenizer_file != ByteTokenizer.file and not is_plain_name(tokenizer_file):
            raise ValueError(f"a tokenizer called {tokenizer_file!r}")
        if not isinstance(eos, str | None):
            raise ValueError(f"documents that end with {eos!r}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {error!r}") from None
    tokens = TokenFile(folder / TOKENS, dtype)
    ends = TokenFile(folder / DOCUMENTS, np.dtype("<i8"))
    if len(tokens) != total:
        raise DataError(f"{tokens.path} is truncated: it has {len(tokens)} tokens, not {total}")
    last_end = ends[len(ends) - 1 :].tolist()
    if not len(ends) or last_end != [total]:
        raise DataError(f"{ends.path} is not of the {total} tokens next to it: prepare it again")
    tokenizer: Tokenizer = ByteTokenizer()
    if tokenizer_file:
        tokenizer = load_tokenizer(folder / tokenizer_file)
    if tokenizer.sha256 != tokenizer_sha256:
        raise DataError(f"{folder / tokenizer_file} is not the tokenizer that made {tokens.path}: prepare it again")
    if eos is not None:
        # The tokenizer's file alone does not say which of its tokens ends a document.
        tokenizer.chat = ChatFormat(special_tokens={"eos_token": eos})
    return _corpus(
        tokens,
        source=str(folder),
        sha256=sha256,
        tokenizer=tokenizer,
        documents=lambda: ends,
        bytes_per_token=bytes_per_token,
    )


def _open_bin(path: Path, token_dtype: str | None) -> Corpus:
    """Open a ``.bin`` without an index: llm.c's if it has that header, else nanoGPT's."""
    tokens = _bin_tokens(path, token_dtype)
    validation_path = path.with_name("val.bin")
    if path.name == "train.bin" and validation_path.is_file():
        return Corpus(
            train=tokens,
            validation=_bin_tokens(validation_path, token_dtype),
            source=f"{path}, {validation_path}",
            files=2,
            sha256=fingerprint(path, validation_path),
            unit="tokens",
        )
    return _corpus(tokens, source=str(path), sha256=fingerprint(path))


def _bin_tokens(path: Path, token_dtype: str | None) -> TokenFile:
    """Open a ``.bin``.

    Raises:
        DataError: it is of another format, is not as long as its header says, or nothing says which type its tokens
            have.
    """
    with reading(path), open_file(path) as file:
        head = file.read(HEAD)
    check_magic(path, head)
    # A shorter file is filled up with zeros, which are not a magic number.
    three_numbers = head[:12].ljust(12, b"\0")
    magic, version, count = struct.unpack("<iii", three_numbers)
    if (magic, version) in _LLMC_TYPES:
        dtype = np.dtype(_LLMC_TYPES[magic, version])
        if token_dtype not in (None, dtype.name):
            raise DataError(f"{path}: --token_dtype is {token_dtype}, and its header says {dtype.name}")
        tokens = TokenFile(path, dtype, _LLMC_HEADER // dtype.itemsize)
        # Negative if the file is shorter than its header.
        size = tokens.end - tokens.begin
        if size != count:
            raise DataError(f"{path} has {size} tokens, and its header says {count}: it is truncated, or damaged")
        return tokens
    if token_dtype is None:
        raise DataError(
            f"{path} has no header, and so does not say which type its tokens have: say it by --token_dtype, such "
            f"as uint16, which nanoGPT writes"
        )
    little_endian = np.dtype(token_dtype).newbyteorder("<")
    return TokenFile(path, little_endian)


def _open_megatron(index: Path) -> Corpus:
    with reading(index), open_file(index) as file:
        head = file.read(_MEGATRON_HEAD)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _MEGATRON_HEAD or not head.startswith(_MEGATRON_MAGIC):
        raise DataError(f"{index} does not begin with MMIDIDX and version 1, as Megatron's MMapIndexedDataset does")
    fields = head[len(_MEGATRON_MAGIC) :]
    type_code, n_sequences, n_documents = struct.unpack("<BQQ", fields)
    if type_code not in _MEGATRON_TYPES:
        raise DataError(f"{index} has tokens of type {type_code}, which is not an integer type of Megatron's index")
    # Where each of the three arrays begins, and where the last one ends, in bytes.
    sizes_at = _MEGATRON_HEAD
    pointers_at = sizes_at + 4 * n_sequences
    documents_at = pointers_at + 8 * n_sequences
    needed = documents_at + 8 * n_documents
    if not n_sequences or not n_documents or needed > size:
        raise DataError(f"{index} is truncated: {n_sequences} sequences and {n_documents} ends need {needed} bytes")
    tokens = TokenFile(index.with_suffix(".bin"), np.dtype(_MEGATRON_TYPES[type_code]))
    token_bytes = tokens.dtype.itemsize
    # Mapped, not read: an index may have gigabytes.
    sizes = np.memmap(index, "<i4", "r", sizes_at, (n_sequences,))
    pointers = np.memmap(index, "<i8", "r", pointers_at, (n_sequences,))
    # The first sequence of each document.
    firsts = np.memmap(index, "<i8", "r", documents_at, (n_documents,))
    last_begin = int(pointers[-1]) // token_bytes
    total = last_begin + int(sizes[-1])
    # The .bin and its index may belong to two runs of the preparation.
    if total != len(tokens):
        raise DataError(
            f"{tokens.path} has {len(tokens)} tokens, and its index {total}: it is truncated, or belongs to another "
            "index"
        )

    # Called only for packing: most runs do not need the documents.
    def ends() -> TokenArray:
        # The first token of each sequence, and the end of the last.
        starts = np.append(pointers // token_bytes, total)
        try:
            return starts[firsts[1:]]
        except IndexError:
            raise DataError(
                f"{index} is damaged: a document ends with a sequence that the index does not have"
            ) from None

    sha256 = fingerprint(index, tokens.path)
    return _corpus(tokens, source=str(tokens.path), sha256=sha256, documents=ends)


def _corpus(tokens: TokenFile, **fields: Any) -> Corpus:
    """Make a corpus of one file; its last tenth is for validation."""
    if len(tokens) < 2:
        raise DataError(f"--text {fields['source']} has {len(tokens)} tokens: it needs at least 2")
    train, validation = tokens.split()
    return Corpus(train, validation, files=1, unit="tokens", **fields)


def fingerprint(*paths: Path) -> str:
    """A hash of the files' sizes and their first and last MiB.

    Files may have terabytes, and every rank computes this at the start of a run.
    """
    digests = []
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(b"%d\n" % size)
            digest.update(file.read(_ENDS))
            file.seek(max(size - _ENDS, 0))
            digest.update(file.read(_ENDS))
        digests.append(digest.hexdigest())
    if len(digests) == 1:
        return digests[0]
    joined = " ".join(digests)
    return hashlib.sha256(joined.encode()).hexdigest()
