"""Pieces of text to tokens, in processes of their own, and each to a file of its own."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.pieces import Piece, read_documents
from mmm.errors import DataError


class Encoding(NamedTuple):
    """What pieces are encoded by, and where to.

    Attributes:
        folder: of the pieces' files.
        appended: the tokens at the end of a document.
    """

    folder: Path
    tokenizer: Tokenizer
    separator: bytes
    field: str
    appended: tuple[int, ...]

    def path(self, piece: Piece) -> Path:
        """Where the tokens of a piece are."""
        return self.folder / f"piece-{piece.file}-{piece.begin}.npz"


class Encoded(NamedTuple):
    """A piece: its tokens; (documents,) int64, the tokens before each end of a document; its bytes of text."""

    tokens: np.ndarray
    ends: np.ndarray
    bytes: np.int64


class Counts(NamedTuple):
    """What a piece has, or several."""

    tokens: int
    documents: int
    bytes: int


def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes that end when this one does, however it ends."""
    return ProcessPoolExecutor(processes, get_context("fork"), _begin)


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


_encoding: Encoding  # what `_encode` goes by: inherited by the processes, since a tokenizer cannot be pickled


def encode(pieces: Iterable[Piece], processes: int, encoding: Encoding) -> Iterator[Counts]:
    """What each piece has, once its tokens are in its file. Those that are there already are read alone."""
    global _encoding
    _encoding = encoding
    with pool_of(processes) as pool:
        try:
            yield from pool.map(_encode, pieces)
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(piece: Piece) -> Counts:
    path = _encoding.path(piece)
    encoded = read_piece(path)
    if encoded is None:
        encoded = _encoded(piece)
        buffer = io.BytesIO()
        np.savez(buffer, **encoded._asdict())
        write(path, buffer.getbuffer())
    return Counts(len(encoded.tokens), len(encoded.ends), int(encoded.bytes))


def _encoded(piece: Piece) -> Encoded:
    tokenizer = _encoding.tokenizer
    texts = read_documents(piece, _encoding.separator, _encoding.field, utf8=tokenizer.kind != ByteTokenizer.kind)
    try:
        documents = [tokenizer.encode(text) for text in texts]
    except DataError as error:
        raise DataError(f"{piece.path}, bytes {piece.begin} to {piece.end}: {error}") from None
    size = np.int64(sum(map(len, texts)))
    if not piece.last:  # of a document that goes on
        return Encoded(np.concatenate(documents), np.zeros(0, np.int64), size)
    end = np.array(_encoding.appended, tokenizer.dtype)
    tokens = [part for document in documents for part in (document, end)]
    ends = np.cumsum([len(document) + len(end) for document in documents], dtype=np.int64)
    return Encoded(np.concatenate([end[:0], *tokens]), ends, size)


def read_piece(path: Path) -> Encoded | None:
    """A piece from its file, whose checksums are compared; None where there is none, or not as it was written."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return Encoded(**file)
    except Exception:  # whatever the file has become: the piece is encoded again
        return None


def write(path: Path, content: bytes | memoryview) -> None:
    """A file that is there completely or not at all."""
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
