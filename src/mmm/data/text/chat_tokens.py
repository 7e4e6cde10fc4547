"""Conversations as samples: a sequence each, or packed; the targets are the tokens of answers, all others `PADDING`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmm.data.order import epoch_order
from mmm.data.text.chats import ChatArrays
from mmm.data.text.documents import PackedTokens
from mmm.data.text.file_tokens import check_vocabulary
from mmm.data.text.tokens import Tokens
from mmm.errors import DataError
from mmm.layout import PADDING


class ChatText:
    """Conversations in memory, as a `TokenArray`.

    Attributes:
        path: for messages. chats: of each, its tokens and which are answers'.
    """

    def __init__(self, path: Path, chats: Sequence[ChatArrays]) -> None:
        self.path, self.chats = path, tuple(chats)
        self.tokens, self.answers = (
            np.concatenate(arrays) if arrays else np.zeros(0, np.int64) for arrays in zip(*chats, strict=True)
        )
        self.ends = np.cumsum([len(chat.tokens) for chat in self.chats], dtype=np.int64)
        self.begin, self.end = 0, len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> np.ndarray:
        return self.tokens[part]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.tokens.tobytes())
        for array in (self.answers, self.ends):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def split(self) -> tuple[ChatText, ChatText]:
        """The last tenth of the conversations, one at least, is for validation."""
        train = len(self.chats) - max(len(self.chats) // 10, 1)
        return ChatText(self.path, self.chats[:train]), ChatText(self.path, self.chats[train:])

    def cut(self, seq_length: int) -> ChatText:
        """Each conversation's first `seq_length` inputs with their targets; those of which no answer is left go.

        Raises:
            DataError: none is left.
        """
        first = (ChatArrays(*(array[: seq_length + 1] for array in chat)) for chat in self.chats)
        kept = [chat for chat in first if chat.answers[1:].any()]
        if not kept:
            raise DataError(
                f"--text {self.path}: no answer begins within --seq_length {seq_length} tokens: make it larger"
            )
        return ChatText(self.path, kept)

    def note(self, seq_length: int) -> str:
        """What `cut` changes, for people."""
        longer = sum(len(chat.tokens) > seq_length + 1 for chat in self.chats)
        gone = sum(not chat.answers[1 : seq_length + 1].any() for chat in self.chats)
        longest = max(len(chat.tokens) for chat in self.chats) - 1
        said = f"{len(self.chats)} conversations, {self.answers.sum()} of {len(self)} tokens are answers"
        if longer:
            said += (
                f"; {longer} are longer than --seq_length {seq_length} (the longest {longest}): what is beyond is cut"
            )
        return f"{said}; {gone}, of which no answer is left, are left out" if gone else said


class ChatTokens(Tokens):
    """A conversation a sequence, in an order that depends on seed and epoch; what stays empty is padding.

    Args:
        text: of `ChatText.cut`. vocab_size: of the model.

    Raises:
        DataError: a token that the vocabulary lacks.
    """

    has_padding = True

    def __init__(self, text: ChatText, seq_length: int, seed: int, shuffle: bool = True, *, vocab_size: int) -> None:
        super().__init__(seq_length, seed)
        self.text, self.shuffle, self.samples = text, shuffle, len(text.chats)
        check_vocabulary(text.path, text.tokens, vocab_size)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        number = int(epoch_order(self.seed, epoch, self.samples)[place]) if self.shuffle else place
        tokens, answers = self.text.chats[number]
        row = np.stack((np.zeros(self.seq_length, np.int64), np.full(self.seq_length, PADDING)))
        row[0, : len(tokens) - 1] = tokens[:-1]
        row[1, : len(tokens) - 1] = np.where(answers[1:], tokens[1:], PADDING)
        return row


class PackedChats(PackedTokens):
    """Whole conversations, several a sequence, as `PackedTokens` has it.

    Args:
        text: of `ChatText.cut`, so that each fits.
    """

    def __init__(
        self,
        text: ChatText,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        *,
        vocab_size: int,
        document_starts: bool,
    ) -> None:
        self.answers = text.answers
        rest = (text, text.ends, seq_length, seed, shuffle)
        super().__init__(*rest, vocab_size=vocab_size, document_starts=document_starts)

    def targets(self, begin: int, tokens: np.ndarray) -> np.ndarray:
        of_answers = self.answers[begin + 1 : begin + len(tokens)]
        return np.where(of_answers, tokens[1:], PADDING)


class FilledUp(Tokens):
    """Other samples, and after the last as many without targets as a global batch asks for: each is evaluated, however
    few there are."""

    has_padding = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens.seq_length, tokens.seed)
        self.tokens, self.samples = tokens, tokens.samples

    def steps_per_epoch(self, global_batch: int) -> int:
        return -(-self.samples // global_batch)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        if place < self.samples:
            return self.tokens.sample(epoch, place)
        row = np.zeros_like(self.tokens.sample(epoch, 0))
        row[1] = PADDING
        return row
