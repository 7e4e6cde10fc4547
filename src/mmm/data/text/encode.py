"""Pieces of text to tokens, in processes of their own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.pieces import Piece, read_documents
from mmm.errors import DataError


class Encoding(NamedTuple):
    """What pieces are encoded by.

    Attributes:
        appended: the tokens at the end of a document.
    """

    tokenizer: Tokenizer
    separator: bytes
    field: str
    appended: tuple[int, ...]


class Encoded(NamedTuple):
    """A piece: its tokens; (documents,) int64, the tokens before each end of a document; its bytes of text."""

    tokens: np.ndarray
    ends: np.ndarray
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


def encode(pieces: Sequence[Piece], processes: int, encoding: Encoding) -> Iterator[Encoded]:
    """Each piece, in order; a few are encoded ahead."""
    global _encoding
    _encoding = encoding
    ahead: deque[Future[Encoded]] = deque()
    with pool_of(processes) as pool:
        for piece in pieces:
            ahead.append(pool.submit(_encode, piece))
            if len(ahead) > 2 * processes:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _encode(piece: Piece) -> Encoded:
    tokenizer = _encoding.tokenizer
    texts = read_documents(piece, _encoding.separator, _encoding.field, utf8=tokenizer.kind != ByteTokenizer.kind)
    try:
        documents = [tokenizer.encode(text) for text in texts]
    except DataError as error:
        raise DataError(f"{piece.path}, bytes {piece.begin} to {piece.end}: {error}") from None
    size = sum(map(len, texts))
    if not piece.last:  # of a document that goes on
        return Encoded(np.concatenate(documents), np.zeros(0, np.int64), size)
    end = np.array(_encoding.appended, tokenizer.dtype)
    parts = [part for document in documents for part in (document, end)]
    ends = np.cumsum([len(document) + len(end) for document in documents], dtype=np.int64)
    return Encoded(np.concatenate([end[:0], *parts]), ends, size)
