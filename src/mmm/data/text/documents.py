"""Sequences of tokens in a file: what comes, or whole documents.

`FileTokens`: of a file whose documents do not matter. `PackedTokens`: whole documents, as many as fit; only one that is
longer than a sequence is split, and no target is the first token of the next document.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmm.data.order import permuted
from mmm.data.text.token_file import TokenFile
from mmm.data.text.tokens import TextTokens, TokenArray, Tokens
from mmm.errors import DataError
from mmm.layout import PADDING

Piece = tuple[np.ndarray, np.ndarray]  # inputs and targets of a document, or of a part of it, (tokens,) each


class FileTokens(TextTokens):
    """As `TextTokens`, of a file of tokens that may have 10¹² of them: the order is computed, place by place.

    Args:
        vocab_size: of the model: a token that it lacks is refused when it is read.

    Raises:
        DataError: as of `TextTokens`; the first or the last sample has a token that the vocabulary lacks.
    """

    def __init__(
        self, text: TokenFile, seq_length: int, seed: int, shuffle: bool = True, *, vocab_size: int = 1 << 63
    ) -> None:
        super().__init__(text, seq_length, seed, shuffle, unit="tokens")
        self.path = text.path
        self.vocab_size = vocab_size
        for begin in (0, (self.samples - 1) * seq_length):
            check_vocabulary(self.path, text[begin : begin + seq_length], vocab_size)

    def shuffled(self, epoch: int, place: int) -> int:
        return permuted(place, self.samples, self.seed, epoch)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        row = super().sample(epoch, place)
        check_vocabulary(self.path, row, self.vocab_size)
        return row


def check_vocabulary(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataError where tokens of a file are not in the vocabulary."""
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"{path} has token {token}, and the model's vocabulary ends at {vocab_size - 1}: "
                f"give the --tokenizer that made the file, or its --vocab_size"
            )


class DocumentTokens(Tokens):
    """Sequences of one or more documents.

    What stays empty has token 0, `PADDING` as targets, and is a document of its own.

    Attributes:
        document_starts: whether samples have where the document of each token begins.
    """

    has_padding = True

    def __init__(self, seq_length: int, seed: int, shuffle: bool, document_starts: bool) -> None:
        super().__init__(seq_length, seed, shuffle)
        self.document_starts = document_starts

    @abstractmethod
    def pieces(self, sequence: int) -> Iterator[Piece]:
        """The documents of a sequence, which fit into it."""

    def sample(self, epoch: int, place: int) -> np.ndarray:
        """(2, seq_length): inputs and targets; or 3, with where the document of each token begins."""
        row = np.zeros((3, self.seq_length), np.int64)
        row[1] = PADDING
        begin = 0
        for inputs, targets in self.pieces(self.number(epoch, place)):
            end = begin + len(inputs)
            row[0, begin:end] = inputs
            row[1, begin:end] = targets
            row[2, begin:end] = begin
            begin = end
        row[2, begin:] = begin
        return row if self.document_starts else row[:2]


class PackedTokens(DocumentTokens):
    """Whole documents, packed into sequences.

    A document of n tokens has n - 1 inputs with a target. Documents are taken in order: one that does not fit into what
    is left of a sequence begins the next one. A document that is longer than a sequence fills as many as it can, and
    the rest of it begins one.

    Args:
        ends: (documents,) int64: the tokens of the full file before the end of each.

    Raises:
        DataError: no document has two tokens; the documents do not end where the tokens do, or in no order; the first
            or the last sample has a token that the vocabulary lacks.
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
        edges = np.concatenate(([0], ends[:]))  # first token of each document, and the end of the last
        if (np.diff(edges) < 0).any() or edges[-1] < text.end:
            raise DataError(f"{text.path}: the ends of its documents are not in order, or end before token {text.end}")
        # In this part of the file, documents of others have no tokens.
        edges = np.clip(edges, text.begin, text.end) - text.begin
        self.begins, self.sizes, self.firsts = pack_in_order(edges, seq_length)
        self.samples = len(self.firsts) - 1
        if not self.samples:
            raise DataError(f"{text.path}: none of its {len(ends)} documents has two tokens, which packing needs")
        for sequence in (0, self.samples - 1):
            list(self.pieces(sequence))  # checks the vocabulary

    def shuffled(self, epoch: int, place: int) -> int:
        return permuted(place, self.samples, self.seed, epoch)

    def pieces(self, sequence: int) -> Iterator[Piece]:
        for piece in range(self.firsts[sequence], self.firsts[sequence + 1]):
            begin = int(self.begins[piece])
            tokens = self.text[begin : begin + int(self.sizes[piece]) + 1]
            check_vocabulary(self.text.path, tokens, self.vocab_size)
            yield tokens[:-1], tokens[1:]


def pack_in_order(edges: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack documents into sequences. A piece is a document, or of one that is longer than a sequence a part of it.

    Args:
        edges: first token of each document, and the end of the last, (documents + 1,).

    Returns:
        The first token of each piece, (pieces,); how many of its inputs have a target, (pieces,); the first piece of
        each sequence, and at the end the number of pieces, (sequences + 1,).
    """
    inputs = np.maximum(np.diff(edges) - 1, 0)  # of each document, those with a target
    pieces = (inputs + seq_length - 1) // seq_length  # of each document
    document = np.repeat(np.arange(len(inputs)), pieces)  # of each piece
    before = (np.arange(len(document)) - (pieces.cumsum() - pieces)[document]) * seq_length  # inputs of its document
    begins = edges[document] + before
    sizes = np.minimum(inputs[document] - before, seq_length)
    return begins, sizes, firsts_in_order(sizes, seq_length)


def firsts_in_order(sizes: np.ndarray, room: int) -> np.ndarray:
    """The first size of each bin, and the number of sizes: a size that does not fit into the bin begins the next one.

    Args:
        sizes: from 1 to `room`, which is that of a bin.
    """
    ends = sizes.cumsum()
    firsts = []
    first = 0
    before = 0
    while first < len(ends):
        firsts.append(first)
        first = bisect_right(ends, before + room, first)
        before = ends[first - 1]
    return np.array([*firsts, len(ends)])
