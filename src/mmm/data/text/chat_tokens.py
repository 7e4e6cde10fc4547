"""Conversations as a corpus, and as samples: a sequence each, or packed; the targets are the tokens of answers, all
others `PADDING`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import DEFAULT, END_OF_TEXT, ChatTemplate, chat_template_of
from mmm.data.text.chats import ChatArrays, Conversation, encode_chat, read_chats, rendered
from mmm.data.text.corpus import Corpus
from mmm.data.text.documents import DocumentTokens, Piece, check_vocabulary, firsts_in_order
from mmm.errors import DataError
from mmm.layout import PADDING
from mmm.units import counted


@dataclass(frozen=True)
class ChatText:
    """Conversations in memory.

    Attributes:
        path: for messages. chats: of each, its tokens and which are answers'.
    """

    path: Path
    chats: list[ChatArrays]

    def __len__(self) -> int:
        """Tokens."""
        return sum(len(chat.tokens) for chat in self.chats)

    @property
    def sha256(self) -> str:
        tokens, answers = (np.concatenate(arrays) for arrays in zip(*self.chats, strict=True))
        ends = np.cumsum([len(chat.tokens) for chat in self.chats], dtype=np.int64)
        return hashlib.sha256(tokens.tobytes() + answers.tobytes() + ends.tobytes()).hexdigest()

    def cut(self, seq_length: int) -> ChatText:
        """Each conversation's first `seq_length` inputs with their targets; those of which no answer is left go.

        Raises:
            DataError: none is left.
        """
        beginnings = [ChatArrays(*(array[: seq_length + 1] for array in chat)) for chat in self.chats]
        chats = [chat for chat in beginnings if chat.answers[1:].any()]
        if not chats:
            raise DataError(
                f"--text {self.path}: no answer begins within --seq_length {seq_length} tokens: make it larger"
            )
        return ChatText(self.path, chats)

    def note(self, seq_length: int) -> str:
        """What is in it, and what `cut` changes, for people."""
        lengths = [len(chat.tokens) for chat in self.chats]
        answers = sum(int(chat.answers.sum()) for chat in self.chats)
        longer = sum(length > seq_length + 1 for length in lengths)
        note = f"{counted(len(lengths), 'conversation')}, {answers} of {len(self)} tokens are answers"
        if longer:
            gone = len(lengths) - len(self.cut(seq_length).chats)
            note += (
                f"; {longer} are longer than --seq_length {seq_length} (the longest {max(lengths) - 1}): what is "
                f"beyond is cut; {gone} have no answer left, and are left out"
            )
        return note


class ChatTokens(DocumentTokens):
    """Conversations in sequences, in an order that depends on seed and epoch; what stays empty is padding.

    Args:
        text: of `ChatText.cut`, so that each fits into a sequence. vocab_size: of the model.
        pack: several in a sequence, in order: one that does not fit into what is left begins the next sequence.

    Raises:
        DataError: a token that the vocabulary lacks.
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

    def steps_per_epoch(self, global_batch: int) -> int:
        """To validate, those that do not fill a global batch are one with samples that have no target."""
        return super().steps_per_epoch(global_batch) if self.shuffle else -(-self.samples // global_batch)

    def pieces(self, sequence: int) -> Iterator[Piece]:
        if sequence < self.samples:
            for chat in self.chats[self.firsts[sequence] : self.firsts[sequence + 1]]:
                yield chat.tokens[:-1], np.where(chat.answers[1:], chat.tokens[1:], PADDING)


def read_chat_files(paths: Sequence[Path]) -> list[Conversation]:
    """Raises DataError: a line is no conversation, by file and line; or there are fewer than two."""
    chats = [chat for path in paths for chat in read_chats(path)]
    if len(chats) < 2:
        raise DataError(f"--text {paths[0]} has one conversation: it needs 2, one to train on and one to validate on")
    return chats


def plain_texts(chats: Sequence[Conversation]) -> Iterator[bytes]:
    """Of each, by the plain template: what a vocabulary of characters is made of."""
    template = ChatTemplate(ChatFormat(DEFAULT, {"eos_token": END_OF_TEXT}))
    return (rendered(chat, template)[0].encode("utf-8", "surrogatepass") for chat in chats)


def encode_chats(paths: Sequence[Path], chats: Sequence[Conversation], tokenizer: Tokenizer) -> Corpus:
    """The conversations in tokens, by the tokenizer's chat template; where it has none it gets the plain one.

    Raises:
        DataError: a conversation that the template does not take, by file and line.
    """
    template = chat_template_of(tokenizer)
    tokenizer.chat = template.format
    text = ChatText(paths[0], [encode_chat(chat, template, tokenizer) for chat in chats])
    train = len(chats) - max(len(chats) // 10, 1)  # the last tenth is for validation, one at least
    notes: tuple[str, ...] = ()
    if template.format.template == DEFAULT:
        end = template.format.special_tokens.get("eos_token")
        ending = f"an answer ends with {end!r}" if end else "nothing marks the end of an answer"
        notes = (f"the tokenizer ({tokenizer}) has no chat template: the plain one is used, and {ending}",)
    return Corpus(
        train=ChatText(paths[0], text.chats[:train]),
        validation=ChatText(paths[0], text.chats[train:]),
        source=", ".join(map(str, paths)),
        files=len(paths),
        sha256=text.sha256,
        unit="tokens",
        tokenizer=tokenizer,
        notes=notes,
    )
