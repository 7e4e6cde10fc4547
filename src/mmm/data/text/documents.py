"""Sequences of tokens in a file, with or without regard to documents.

`FileTokens` cuts the file wherever a sequence ends. `PackedTokens` puts as many whole documents into a sequence as fit.
It splits only a document that is longer than a sequence, and no target is the first token of the next document.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from mmm.data.order import permuted
from mmm.data.text.token_file import TokenFile
from mmm.data.text.tokens import TextTokens, TokenArray, Tokens
from mmm.errors import DataError
from mmm.layout import PADDING

# Inputs and targets of a document, or of a stretch of a long one, (tokens,) each.
Piece = tuple[np.ndarray, np.ndarray]


class FileTokens(TextTokens):
    """Like `TextTokens`, for a file that may have 10¹² tokens: the order is computed, place by place.

    Args:
        text: the file of tokens.
        vocab_size: size of the model's vocabulary; a token outside it is refused when it is read.

    Raises:
        DataError: the file is shorter than one sample, or its first or last sample has a token outside the vocabulary.
    """

    def __init__(
        self,
        text: TokenFile,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        *,
        vocab_size: int = 1 << 63,
    ) -> None:
        super().__init__(text, seq_length, seed, shuffle, unit="tokens")
        self.path = text.path
        self.vocab_size = vocab_size
        last = (self.samples - 1) * seq_length
        for begin in (0, last):
            tokens = text[begin : begin + seq_length]
            check_vocabulary(self.path, tokens, vocab_size)

    def shuffled(self, epoch: int, place: int) -> int:
        return permuted(place, self.samples, self.seed, epoch)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        row = super().sample(epoch, place)
        check_vocabulary(self.path, row[row != PADDING], self.vocab_size)
        return row


def check_vocabulary(source: object, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise DataError if a token of a file or text is outside the vocabulary."""
    # There may be none.
    smallest = int(tokens.min(initial=0))
    largest = int(tokens.max(initial=0))
    for token in (smallest, largest):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"{source} has token {token}, and the model's vocabulary ends at {vocab_size - 1}: give the "
                f"--tokenizer that the model knows; or, unless --init_from decides it, --vocab_size {largest + 1}"
            )


class DocumentTokens(Tokens):
    """Sequences of one or more documents.

    The empty rest of a sequence has token 0 as inputs and `PADDING` as targets, and counts as a document of its own.

    Attributes:
        document_starts: whether samples say where each token's document begins.
    """

    has_padding = True

    def __init__(self, seq_length: int, seed: int, shuffle: bool, document_starts: bool) -> None:
        super().__init__(seq_length, seed, shuffle)
        self.document_starts = document_starts

    @abstractmethod
    def pieces(self, sequence: int) -> Iterator[Piece]:
        """Yield the documents of a sequence, which fit into it."""

    def sample(self, epoch: int, place: int) -> np.ndarray:
        """Read a sequence: (2, seq_length), inputs and targets; or 3, with where each token's document begins."""
        # Inputs, targets, where the document begins: (3, seq_length)
        row = np.zeros((3, self.seq_length), np.int64)
        row[1] = PADDING
        begin = 0
        # Beyond the last sequence there is nothing but padding.
        pieces = self.pieces(self.sequence_at(epoch, place)) if place < self.samples else ()
        for inputs, targets in pieces:
            end = begin + len(inputs)
            row[0, begin:end] = inputs
            row[1, begin:end] = targets
            row[2, begin:end] = begin
            begin = end
        row[2, begin:] = begin
        if self.document_starts:
            return row
        return row[:2]


class PackedTokens(DocumentTokens):
    """Whole documents, packed into sequences.

    A document of n tokens has n - 1 inputs with a target. Documents are taken in order: one that does not fit into what
    is left of a sequence begins the next one. A document that is longer than a sequence fills as many as it can, and
    its rest begins another.

    Args:
        text: the file of tokens, or a stretch of it.
        ends: (documents,) int64: number of tokens of the full file before each document's end.
        vocab_size: size of the model's vocabulary.
        document_starts: whether samples say where each token's document begins.

    Raises:
        DataError: no document has two tokens; the documents' ends are not in order, or lie before the end of the
            tokens; the first or the last sample has a token outside the vocabulary.
    """

    def __init__(
        self,
        text: TokenFile,
        ends: TokenArray,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        *,
        vocab_size: int,
        document_starts: bool,
    ) -> None:
        super().__init__(seq_length, seed, shuffle, document_starts)
        self.text = text
        self.vocab_size = vocab_size
        # First token of each document, and the end of the last: (documents + 1,)
        edges = np.concatenate(([0], ends[:]))
        in_order = (np.diff(edges) >= 0).all()
        if not in_order or edges[-1] < text.end:
            raise DataError(f"{text.path}: the ends of its documents are not in order, or end before token {text.end}")
        # `text` may be only the training tokens of the file: documents outside it become empty.
        edges = np.clip(edges, text.begin, text.end) - text.begin
        self.begins, self.sizes, self.firsts = pack_in_order(edges, seq_length)
        self.samples = len(self.firsts) - 1
        if not self.samples:
            raise DataError(f"{text.path}: none of its {len(ends)} documents has two tokens, which packing needs")
        for sequence in (0, self.samples - 1):
            # Reading a sequence checks the vocabulary.
            list(self.pieces(sequence))

    def shuffled(self, epoch: int, place: int) -> int:
        return permuted(place, self.samples, self.seed, epoch)

    def pieces(self, sequence: int) -> Iterator[Piece]:
        first = self.firsts[sequence]
        end = self.firsts[sequence + 1]
        for piece in range(first, end):
            begin = int(self.begins[piece])
            size = int(self.sizes[piece])
            tokens = self.text[begin : begin + size + 1]
            check_vocabulary(self.text.path, tokens, self.vocab_size)
            yield tokens[:-1], tokens[1:]


def pack_in_order(edges: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack documents into sequences. A piece is a document, or a stretch of one that is longer than a sequence.

    Args:
        edges: first token of each document, and the end of the last, (documents + 1,).

    Returns:
        The first token of each piece, (pieces,); the number of its inputs with a target, (pieces,); the first piece of
        each sequence, and at the end the number of pieces, (sequences + 1,).
    """
    # Per document: its inputs with a target, and its pieces, rounded up. (documents,)
    inputs = np.maximum(np.diff(edges) - 1, 0)
    n_pieces = (inputs + seq_length - 1) // seq_length
    # Per piece: its document, and which of that document's pieces it is. (pieces,)
    document = np.repeat(np.arange(len(inputs)), n_pieces)
    first_piece = n_pieces.cumsum() - n_pieces
    index_in_document = np.arange(len(document)) - first_piece[document]
    # Inputs of its document that earlier pieces have.
    inputs_before = index_in_document * seq_length
    begins = edges[document] + inputs_before
    sizes = np.minimum(inputs[document] - inputs_before, seq_length)
    return begins, sizes, firsts_in_order(sizes, seq_length)


def firsts_in_order(sizes: np.ndarray, room: int) -> np.ndarray:
    """Fill bins in order: a size that does not fit into the current bin begins the next one.

    Args:
        sizes: (sizes,), each from 1 to `room`.
        room: the room in a bin.

    Returns:
        The index of each bin's first size, and at the end the number of sizes, (bins + 1,).
    """
    ends = sizes.cumsum()
    firsts = []
    first = 0
    before = 0
    while first < len(ends):
        firsts.append(first)
        # The first size whose end is beyond the bin.
        first = bisect_right(ends, before + room, first)
        before = ends[first - 1]
    return np.array([*firsts, len(ends)])
