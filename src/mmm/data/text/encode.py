"""Pieces of text to tokens, in processes of their own."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.pieces import Piece, read_documents
from mmm.errors import DataError


class Encoding(NamedTuple):
    """What a piece is encoded by. appended: the tokens at the end of a document."""

    tokenizer: Tokenizer
    separator: bytes
    field: str
    appended: tuple[int, ...]


class Encoded(NamedTuple):
    """A piece: its file's number, its tokens, (documents,) int64 the tokens before each end of a document, its bytes of
    text, the hash of its tokens."""

    file: int
    tokens: np.ndarray
    ends: np.ndarray
    bytes: int
    sha256: str


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


def encode(pieces: Iterator[Piece], processes: int, encoding: Encoding) -> Iterator[Encoded]:
    """The pieces encoded; some more than there are processes are under way, so that none of them waits."""
    waiting: deque[Future[Encoded]] = deque()
    with pool_of(processes, encoding) as pool:
        for piece in pieces:
            waiting.append(pool.submit(_encode, piece))
            if len(waiting) > processes + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _encode(piece: Piece) -> Encoded:
    tokenizer, separator, field, appended = _encoding
    texts = read_documents(piece, separator, field, utf8=tokenizer.kind != ByteTokenizer.kind)
    try:
        arrays = [tokenizer.encode(text) for text in texts]
    except DataError as error:
        raise DataError(f"{piece.path}, bytes {piece.begin} to {piece.end}: {error}") from None
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    if piece.last and appended:
        end = np.array(appended, tokenizer.dtype)
        arrays = [each for array in arrays for each in (array, end)]
        lengths += len(appended)
    tokens = np.concatenate(arrays) if arrays else np.empty(0, tokenizer.dtype)
    ends = lengths.cumsum() if piece.last else lengths[:0]
    return Encoded(piece.file, tokens, ends, sum(map(len, texts)), hashlib.sha256(tokens.data).hexdigest())
