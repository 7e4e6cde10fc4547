"""Conversations as a corpus, and as samples: a sequence each, or packed; the targets are the tokens of answers, all
others `PADDING`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.order import epoch_order
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import DEFAULT, END_OF_TEXT, ChatTemplate, chat_template_of
from mmm.data.text.chats import ChatArrays, Conversation, encode_chat, read_chats, rendered
from mmm.data.text.corpus import Corpus
from mmm.data.text.documents import PackedTokens, check_vocabulary
from mmm.data.text.tokens import TokenArray, Tokens
from mmm.errors import ConfigError, DataError
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


class Chats(NamedTuple):
    """Conversations of some files, before a tokenizer is known."""

    paths: tuple[Path, ...]
    conversations: list[Conversation]

    @property
    def source(self) -> str:
        return ", ".join(map(str, self.paths))

    def plain_texts(self) -> Iterator[bytes]:
        """Of each, by the plain template: what a vocabulary of characters is made of."""
        template = ChatTemplate(ChatFormat(DEFAULT, {"eos_token": END_OF_TEXT}))
        return (rendered(chat, template)[0].encode("utf-8", "surrogatepass") for chat in self.conversations)


def read_chat_files(paths: Sequence[Path]) -> Chats:
    """Raises DataError: a line is no conversation, by file and line; or there are fewer than two."""
    chats = Chats(tuple(paths), [chat for path in paths for chat in read_chats(path)])
    if len(chats.conversations) < 2:
        raise DataError(
            f"--text {chats.source} has one conversation: it needs 2, one to train on and one to validate on"
        )
    return chats


def encode_chats(chats: Chats, tokenizer: Tokenizer) -> Corpus:
    """The conversations in tokens, by the tokenizer's chat template; where it has none it gets the plain one.

    Raises:
        DataError: a conversation that the template does not take, by file and line.
    """
    template = chat_template_of(tokenizer)
    tokenizer.chat = template.format
    text = ChatText(chats.paths[0], [encode_chat(chat, template, tokenizer) for chat in chats.conversations])
    files = len(chats.paths)
    return Corpus(*text.split(), chats.source, files, text.sha256, "tokens", tokenizer, is_chats=True)


def chat_samples(
    text: TokenArray, seq_length: int, seed: int, shuffle: bool, vocab_size: int, pack: bool, document_mask: bool
) -> Tokens:
    """Samples of a part of such a corpus.

    Raises:
        ConfigError: ``--document_mask`` without ``--pack``. DataError: no answer is left, or has a token that the
            vocabulary lacks.
    """
    assert isinstance(text, ChatText)
    if document_mask and not pack:
        raise ConfigError(
            "--document_mask has no effect on conversations, each of which has a sequence of its own: give --pack as "
            "well, or leave it out"
        )
    given = (text.cut(seq_length), seq_length, seed, shuffle)
    if pack:
        return PackedChats(*given, vocab_size=vocab_size, document_starts=document_mask)
    return ChatTokens(*given, vocab_size=vocab_size)


def notes_of(corpus: Corpus, seq_length: int) -> list[str]:
    """What is to be said of such a corpus at the start of a run."""
    tokenizer, notes = corpus.tokenizer, []
    assert tokenizer is not None
    assert tokenizer.chat is not None
    for name, text in (("to train on", corpus.train), ("to validate on", corpus.validation)):
        assert isinstance(text, ChatText)
        notes.append(f"{corpus.source}, {name}: {text.note(seq_length)}")
    if tokenizer.chat.template == DEFAULT:
        end = tokenizer.chat.special_tokens.get("eos_token")
        ending = f"an answer ends with {end!r}" if end else "nothing marks the end of an answer"
        notes.append(f"the tokenizer ({tokenizer}) has no chat template: the plain one is used, and {ending}")
    return notes
