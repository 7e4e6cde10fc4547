"""Turns pieces of text into tokens, in worker processes."""

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
    """How pieces are encoded.

    Attributes:
        tokenizer: the tokenizer.
        separator: what stands between documents; empty if a file is one document.
        field: the field of a JSON line that holds the text.
        appended: tokens that are put at the end of each document.
    """

    tokenizer: Tokenizer
    separator: bytes
    field: str
    appended: tuple[int, ...]


class Encoded(NamedTuple):
    """A piece in tokens.

    Attributes:
        tokens: (tokens,) of the tokenizer's type.
        ends: (documents,) int64, number of the piece's tokens before each document's end.
        bytes: size of its text.
    """

    tokens: np.ndarray
    ends: np.ndarray
    bytes: int


def pool_of(processes: int) -> ProcessPoolExecutor:
    """Start worker processes that end when this process does, however it ends."""
    return ProcessPoolExecutor(processes, get_context("fork"), _begin)


def _begin() -> None:
    # The processes are the parallelism; the package's own threads would compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


# What `_encode` uses. The processes inherit it by fork, because a tokenizer cannot be pickled.
_encoding: Encoding


def encode(pieces: Sequence[Piece], processes: int, encoding: Encoding) -> Iterator[Encoded]:
    """Encode pieces in worker processes, a few of them ahead. Yields them in order."""
    global _encoding
    _encoding = encoding
    ahead: deque[Future[Encoded]] = deque()
    with pool_of(processes) as pool:
        for piece in pieces:
            ahead.append(pool.submit(_encode, piece))
            # No more than that, or all results would be in memory.
            if len(ahead) > 2 * processes:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _encode(piece: Piece) -> Encoded:
    tokenizer = _encoding.tokenizer
    utf8 = tokenizer.kind != ByteTokenizer.kind
    texts = read_documents(piece, _encoding.separator, _encoding.field, utf8)
    try:
        documents = [tokenizer.encode(text) for text in texts]
    except DataError as error:
        raise DataError(f"{piece.path}, bytes {piece.begin} to {piece.end}: {error}") from None
    size = sum(map(len, texts))
    if not piece.last:
        # The piece's document continues in the next piece.
        return Encoded(np.concatenate(documents), np.zeros(0, np.int64), size)
    appended = np.array(_encoding.appended, tokenizer.dtype)
    # The empty array gives the right type if the piece has no documents.
    arrays = [appended[:0]]
    lengths = []
    for document in documents:
        arrays += [document, appended]
        lengths.append(len(document) + len(appended))
    ends = np.cumsum(lengths, dtype=np.int64)
    return Encoded(np.concatenate(arrays), ends, size)
