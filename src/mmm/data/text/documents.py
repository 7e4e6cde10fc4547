"""Sequences of several documents: which tokens of a file of tokens they have, and where in them a document begins.

`FileTokens`: of a file whose documents do not matter. `DocumentTokens`: the file's tokens as they come. `PackedTokens`:
whole documents, as many as fit; only one that is longer than a sequence is split. In the last two, no target is the
first token of the next document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mmm.data.order import permuted
from mmm.data.text.token_file import TokenFile
from mmm.data.text.tokens import TextTokens, TokenArray, Tokens
from mmm.errors import DataError
from mmm.layout import PADDING


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
        self.path, self.vocab_size = text.path, vocab_size
        for number in (0, self.samples - 1):
            check_vocabulary(self.path, text[number * seq_length : (number + 1) * seq_length], vocab_size)

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


WINDOW = 64  # sequences, about, of a group of documents
GROUPS = 1 << 16  # at most so many numbers are kept of a file, however long it is
AT_ONCE = 1 << 18  # documents that are looked at together


def first_after(ends: TokenArray, token: int, begin: int = 0) -> int:
    """The first document, from `begin` on, that ends after so many tokens. ends: (documents,), in ascending order."""
    return bisect_right(range(len(ends)), token, begin, key=lambda number: int(ends[number : number + 1][0]))


def first_in(ends: TokenArray, text: TokenPart) -> int:
    """The first document of a part of a file. At the file's begin it is not searched for, by an order that they may not
    have: `edges_of` sees that, where it gets them all."""
    return first_after(ends, text.begin) if text.begin else 0


def edges_of(text: TokenPart, ends: TokenArray, begin: int, end: int) -> np.ndarray:
    """In tokens of the part of the file: the ends of documents begin … end - 1, and before them the first's begin.

    Raises:
        DataError: they are not in order.
    """
    edges = np.concatenate((ends[begin - 1 : begin] if begin else [0], ends[begin:end]))
    if (edges[1:] < edges[:-1]).any():
        raise DataError(f"{text.path}: the ends of its documents are not in order: prepare it again")
    return np.clip(edges, text.begin, text.end) - text.begin


class TokenPart(TokenArray, Protocol):
    """A file of tokens, or a part of it, or what is like it in memory. begin, end: of the part, in tokens."""

    path: Path
    begin: int
    end: int


class DocumentTokens(FileTokens):
    """As `FileTokens`, with the documents.

    Args:
        ends: (documents,) int64: the tokens of the full file before the end of each.

    Raises:
        DataError: no document has two tokens, and so no token a target.
    """

    has_padding = True

    def __init__(
        self, text: TokenFile, ends: TokenArray, seq_length: int, seed: int, shuffle: bool = True, *, vocab_size: int
    ) -> None:
        super().__init__(text, seq_length, seed, shuffle, vocab_size=vocab_size)
        self.first, self.ends = text.begin, ends
        first, last = first_in(ends, text), first_after(ends, text.end - 1) + 1
        parts = (edges_of(text, ends, begin, begin + AT_ONCE) for begin in range(first, last, AT_ONCE))
        if not any((np.diff(edges) > 1).any() for edges in parts):
            raise DataError(f"{text.path}: none of its {last - first} documents has two tokens: no token has a target")

    def sample(self, epoch: int, place: int) -> np.ndarray:
        row = super().sample(epoch, place)  # (seq_length + 1,)
        begin = self.first + self.first_token(epoch, place)
        next_end = first_after(self.ends, begin)
        after = first_after(self.ends, begin + self.seq_length, next_end)
        at = self.ends[next_end:after] - begin  # 1 … seq_length: where a document begins
        targets, starts = row[1:].copy(), np.zeros(self.seq_length, np.int64)
        targets[at - 1] = PADDING
        at = at[at < self.seq_length]
        starts[at] = at
        return np.stack((row[:-1], targets, np.maximum.accumulate(starts)))


class Packing(NamedTuple):
    """How a group of neighbouring documents is packed.

    A piece is a document, or of one that is longer than a sequence a part of it.

    Attributes:
        begins: first token of each piece, (pieces,), counted in the part of the file.
        sizes: inputs of each piece that have a target, (pieces,).
        firsts: first piece of each sequence, and at the end the number of pieces, (sequences + 1,).
    """

    begins: np.ndarray
    sizes: np.ndarray
    firsts: np.ndarray

    @property
    def sequences(self) -> int:
        return len(self.firsts) - 1


class PackedTokens(Tokens):
    """Whole documents, packed into sequences.

    A document of n tokens has n - 1 inputs with a target. Documents are taken in order: one that does not fit into what
    is left of a sequence begins the next one. A document that is longer than a sequence fills as many as it can, and
    the rest of it begins one. What stays empty has token 0, `PADDING` as targets, and is a document of its own.

    Groups of neighbouring documents are packed each by itself: a sequence is found from the lengths of its group. Kept
    are the numbers of sequences before each of at most `GROUPS` groups, for which all lengths are read once.

    Args:
        ends: as of `DocumentTokens`. document_starts: whether samples have them.

    Raises:
        DataError: no document has two tokens; the documents do not end where the tokens do; the first or the last
            sample has a token that the vocabulary lacks.
    """

    has_padding = True

    def __init__(
        self,
        text: TokenPart,
        ends: TokenArray,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        *,
        vocab_size: int,
        document_starts: bool,
    ) -> None:
        super().__init__(seq_length, seed)
        self.text, self.ends, self.shuffle = text, ends, shuffle
        self.vocab_size, self.document_starts = vocab_size, document_starts
        self.first = first_in(ends, text)
        self.last = first_after(ends, text.end - 1, self.first) + 1
        if self.last > len(ends):
            raise DataError(f"{text.path}: its documents end before token {text.end}: prepare it again")
        documents = self.last - self.first
        mean = max(len(text) / documents, 1)
        wanted = round(WINDOW * seq_length / mean)
        self.group = max(min(wanted, 64 * WINDOW), (documents + GROUPS - 1) // GROUPS, 1)  # documents
        counts = np.fromiter(self._counts(), np.int64)
        self.before = np.concatenate(([0], np.cumsum(counts)))  # (groups + 1,)
        self.samples = int(self.before[-1])
        if not self.samples:
            raise DataError(f"{text.path}: none of its {documents} documents has two tokens, which packing needs")
        self._packing = lru_cache(maxsize=WINDOW)(self._pack)
        for number in (0, self.samples - 1):
            self._sequence(number)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        """(2, seq_length): inputs and targets; or 3, with where the document of each token begins."""
        return self._sequence(permuted(place, self.samples, self.seed, epoch) if self.shuffle else place)

    def _sequence(self, number: int) -> np.ndarray:
        group = int(np.searchsorted(self.before, number, "right")) - 1
        row = np.zeros((3, self.seq_length), np.int64)
        row[1] = PADDING
        filled = 0
        for begin, length in self._pieces(group, number - int(self.before[group])):
            tokens = self.text[begin : begin + length + 1]
            check_vocabulary(self.text.path, tokens, self.vocab_size)
            at = slice(filled, filled + length)
            row[0, at], row[1, at], row[2, at] = tokens[:-1], self.targets(begin, tokens), filled
            filled += length
        row[2, filled:] = filled
        return row if self.document_starts else row[:2]

    def targets(self, begin: int, tokens: np.ndarray) -> np.ndarray:
        """Of all tokens but the last: the next one.

        Args:
            begin: the first token's place in the text.
        """
        return tokens[1:]

    def _pieces(self, group: int, number: int) -> Iterable[tuple[int, int]]:
        """Of a sequence of a group, its pieces: the first token of each, and how many inputs."""
        packing = self._packing(group)
        pieces = slice(packing.firsts[number], packing.firsts[number + 1])
        return zip(packing.begins[pieces].tolist(), packing.sizes[pieces].tolist(), strict=True)

    def _counts(self) -> Iterable[int]:
        """The sequences of each group."""
        at_once = max(AT_ONCE // self.group, 1) * self.group
        for begin in range(self.first, self.last, at_once):
            edges = edges_of(self.text, self.ends, begin, min(begin + at_once, self.last))
            for first in range(0, len(edges) - 1, self.group):
                yield pack_in_order(edges[first : first + self.group + 1], self.seq_length).sequences

    def _pack(self, group: int) -> Packing:
        begin = self.first + group * self.group
        edges = edges_of(self.text, self.ends, begin, min(begin + self.group, self.last))
        return pack_in_order(edges, self.seq_length)


def pack_in_order(edges: np.ndarray, seq_length: int) -> Packing:
    """Pack neighbouring documents.

    Args:
        edges: first token of each document, and the end of the last, (documents + 1,).
    """
    inputs = np.maximum(np.diff(edges) - 1, 0)  # of each document, those with a target
    pieces = (inputs + seq_length - 1) // seq_length  # of each document
    document = np.repeat(np.arange(len(inputs)), pieces)  # of each piece
    number = np.arange(len(document)) - (pieces.cumsum() - pieces)[document]  # of a piece in its document
    begins = edges[document] + number * seq_length
    sizes = np.minimum(inputs[document] - number * seq_length, seq_length)
    return Packing(begins, sizes, firsts_in_order(sizes, seq_length))


def firsts_in_order(sizes: np.ndarray, room: int) -> np.ndarray:
    """The first size of each bin, and the number of sizes: a size that does not fit into the bin begins the next one.

    Args:
        sizes: from 1 to `room`, which is that of a bin.
    """
    ends = sizes.cumsum().tolist()
    firsts = []
    first = before = 0
    while first < len(ends):
        firsts.append(first)
        first = bisect_right(ends, before + room, first)
        before = ends[first - 1]
    return np.array([*firsts, len(ends)])
