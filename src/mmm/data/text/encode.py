"""Pieces of text to tokens, in processes of their own, and each to a file of its own."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.pieces import Piece, read_documents
from mmm.errors import DataError

PIECES = "piece-*.npz"


class Encoding(NamedTuple):
    """What pieces are encoded by, and where to.

    Attributes:
        folder: of the pieces' files.
        appended: the tokens at the end of a document.
        files: by a file's number, what tells it from another and from itself before it changed.
    """

    folder: Path
    tokenizer: Tokenizer
    separator: bytes
    field: str
    appended: tuple[int, ...]
    files: tuple[str, ...]

    def path(self, piece: Piece) -> Path:
        """Where the tokens of a piece are: its name is a hash of all that decides them."""
        field = self.field if piece.text_file.jsonl else None
        place = [self.files[piece.file], piece.begin, piece.end, piece.last]
        rules = [self.tokenizer.sha256, self.separator.hex(), field, self.appended]
        digest = hashlib.sha256(json.dumps([*place, *rules]).encode()).hexdigest()
        return self.folder / PIECES.replace("*", digest)


class Encoded(NamedTuple):
    """A piece: its tokens; (documents,) int64, the tokens before each end of a document; its bytes of text."""

    tokens: np.ndarray
    ends: np.ndarray
    bytes: int


class Counts(NamedTuple):
    """What a piece has, or several."""

    tokens: int
    documents: int
    bytes: int


def pool_of(processes: int, encoding: Encoding | None = None) -> ProcessPoolExecutor:
    """Processes that end when this one does, however it ends."""
    return ProcessPoolExecutor(processes, get_context("fork"), _begin, (encoding,))


_encoding: Encoding  # in a process of the pool: what `_encode` goes by


def _begin(encoding: Encoding | None) -> None:
    global _encoding
    if encoding is not None:
        _encoding = encoding
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def encode(pieces: Iterable[Piece], processes: int, encoding: Encoding) -> Generator[Counts]:
    """What each piece has, once its tokens are in its file. Those that are there already are read alone."""
    with pool_of(processes, encoding) as pool:
        try:
            yield from pool.map(_encode, pieces)
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(piece: Piece) -> Counts:
    path = _encoding.path(piece)
    encoded = read_piece(path, _encoding.tokenizer.dtype)
    if encoded is None:
        encoded = _encoded(piece)
        buffer = io.BytesIO()
        np.savez(buffer, tokens=encoded.tokens, ends=encoded.ends, bytes=np.int64(encoded.bytes))
        write(path, buffer.getbuffer())
    return Counts(len(encoded.tokens), len(encoded.ends), encoded.bytes)


def _encoded(piece: Piece) -> Encoded:
    tokenizer, appended = _encoding.tokenizer, _encoding.appended
    texts = read_documents(piece, _encoding.separator, _encoding.field, utf8=tokenizer.kind != ByteTokenizer.kind)
    try:
        arrays = [tokenizer.encode(text) for text in texts]
    except DataError as error:
        raise DataError(f"{piece.path}, bytes {piece.begin} to {piece.end}: {error}") from None
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    if piece.last and appended:
        end = np.array(appended, tokenizer.dtype)
        arrays = [part for array in arrays for part in (array, end)]
        lengths += len(appended)
    tokens = np.concatenate(arrays) if arrays else np.empty(0, tokenizer.dtype)
    ends = lengths.cumsum() if piece.last else lengths[:0]
    return Encoded(tokens, ends, sum(map(len, texts)))


def read_piece(path: Path, dtype: np.dtype) -> Encoded | None:
    """A piece from its file, whose checksums are compared; None where there is none, or not as it was written."""
    try:
        with np.load(path, allow_pickle=False) as file:
            encoded = Encoded(file["tokens"], file["ends"], int(file["bytes"]))
    except Exception:  # whatever the file has become: the piece is encoded again
        return None
    same_types = (encoded.tokens.dtype, encoded.ends.dtype) == (dtype, np.int64)
    return encoded if same_types and encoded.tokens.ndim == encoded.ends.ndim == 1 else None


def write(path: Path, content: bytes | memoryview) -> None:
    """A file that is there completely or not at all."""
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
