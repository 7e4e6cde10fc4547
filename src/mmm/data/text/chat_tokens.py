"""Conversations as a corpus and as samples: one per sequence, or packed.

The targets are the tokens of answers; all other targets are `PADDING`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import DEFAULT, chat_template_of
from mmm.data.text.chats import ChatArrays, Conversation, encode_chat, read_chats
from mmm.data.text.corpus import Corpus
from mmm.data.text.documents import DocumentTokens, Piece, check_vocabulary, firsts_in_order
from mmm.errors import DataError
from mmm.layout import PADDING
from mmm.units import counted


@dataclass(frozen=True)
class ChatText:
    """Conversations in memory.

    Attributes:
        path: file that messages name.
        chats: the tokens of each conversation, and which of them are answers.
    """

    path: Path
    chats: list[ChatArrays]

    def __len__(self) -> int:
        """Number of tokens."""
        return sum(len(chat.tokens) for chat in self.chats)

    @property
    def sha256(self) -> str:
        tokens = np.concatenate([chat.tokens for chat in self.chats])
        answers = np.concatenate([chat.answers for chat in self.chats])
        lengths = [len(chat.tokens) for chat in self.chats]
        ends = np.cumsum(lengths, dtype=np.int64)
        digest = hashlib.sha256(tokens.tobytes())
        digest.update(answers.tobytes())
        digest.update(ends.tobytes())
        return digest.hexdigest()

    def cut(self, seq_length: int) -> ChatText:
        """Keep each conversation's first `seq_length` inputs with their targets.

        A conversation without an answer among them is left out.

        Raises:
            DataError: no conversation is left.
        """
        chats = []
        for chat in self.chats:
            # The last target has no input of its own, hence + 1.
            tokens = chat.tokens[: seq_length + 1]
            answers = chat.answers[: seq_length + 1]
            # The first token is not a target.
            if answers[1:].any():
                chats.append(ChatArrays(tokens, answers))
        if not chats:
            raise DataError(
                f"--text {self.path}: no answer begins within --seq_length {seq_length} tokens: make it larger"
            )
        return ChatText(self.path, chats)

    def note(self, seq_length: int) -> str:
        """Describe for people what it contains, and what `cut` changes."""
        lengths = [len(chat.tokens) for chat in self.chats]
        n_answers = sum(int(chat.answers.sum()) for chat in self.chats)
        n_longer = sum(length > seq_length + 1 for length in lengths)
        n_chats = counted(len(lengths), "conversation")
        note = f"{n_chats}, {n_answers} of {len(self)} tokens are answers"
        if n_longer:
            # A sequence has one input less than tokens.
            longest = max(lengths) - 1
            n_removed = len(lengths) - len(self.cut(seq_length).chats)
            note += (
                f"; {n_longer} are longer than --seq_length {seq_length} (the longest {longest}): what is "
                f"beyond is cut; {n_removed} have no answer left, and are left out"
            )
        return note


class ChatTokens(DocumentTokens):
    """Conversations in sequences, in an order that depends on seed and epoch. The rest of a sequence is padding.

    Args:
        text: conversations from `ChatText.cut`, so that each fits into a sequence.
        vocab_size: size of the model's vocabulary.
        pack: whether a sequence may have several conversations. They are taken in order: one that does not fit into
            what is left of a sequence begins the next one.
        document_starts: whether samples say where each token's conversation begins.

    Raises:
        DataError: a token is outside the vocabulary.
    """

    def __init__(
        self,
        text: ChatText,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        *,
        vocab_size: int,
        pack: bool = False,
        document_starts: bool = False,
    ) -> None:
        super().__init__(seq_length, seed, shuffle, document_starts)
        self.chats = text.chats
        # The first conversation of each sequence, and at the end their number: (sequences + 1,)
        self.firsts = np.arange(len(self.chats) + 1)
        if pack:
            inputs = np.array([len(chat.tokens) - 1 for chat in self.chats])
            self.firsts = firsts_in_order(inputs, seq_length)
        self.samples = len(self.firsts) - 1
        for chat in self.chats:
            check_vocabulary(text.path, chat.tokens, vocab_size)

    def pieces(self, sequence: int) -> Iterator[Piece]:
        first = self.firsts[sequence]
        end = self.firsts[sequence + 1]
        for chat in self.chats[first:end]:
            inputs = chat.tokens[:-1]
            targets = np.where(chat.answers[1:], chat.tokens[1:], PADDING)
            yield inputs, targets


def read_chat_files(paths: Sequence[Path]) -> list[Conversation]:
    """Read the conversations of files.

    Raises:
        DataError: a line is not a conversation (the message names file and line), or there are fewer than two.
    """
    chats = [chat for path in paths for chat in read_chats(path)]
    if len(chats) < 2:
        raise DataError(f"--text {paths[0]} has one conversation: it needs 2, one to train on and one to validate on")
    return chats


def encode_chats(paths: Sequence[Path], chats: Sequence[Conversation], tokenizer: Tokenizer) -> Corpus:
    """Encode conversations by the tokenizer's chat template. A tokenizer without one is given the plain template.

    Raises:
        DataError: the template refuses a conversation; the message names file and line.
    """
    template = chat_template_of(tokenizer)
    tokenizer.chat = template.format
    encoded = [encode_chat(chat, template, tokenizer) for chat in chats]
    # The last tenth is for validation, at least one conversation.
    n_train = len(chats) - max(len(chats) // 10, 1)
    end = template.end_of_answers()
    ending = f"an answer ends with {end!r}"
    if not end:
        ending = "no special token marks the end of an answer, so the model will not stop by itself"
    notes: tuple[str, ...] = ()
    if template.format.template == DEFAULT:
        notes = (f"the tokenizer ({tokenizer}) has no chat template: the plain one is used, and {ending}",)
    elif not end:
        notes = (f"the chat template of the tokenizer ({tokenizer}): {ending}",)
    return Corpus(
        train=ChatText(paths[0], encoded[:n_train]),
        validation=ChatText(paths[0], encoded[n_train:]),
        source=", ".join(map(str, paths)),
        files=len(paths),
        sha256=ChatText(paths[0], encoded).sha256,
        unit="tokens",
        tokenizer=tokenizer,
        notes=notes,
    )
