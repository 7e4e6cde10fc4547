"""Files of conversations as a corpus, and as samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import DEFAULT, END_OF_TEXT, ChatTemplate, chat_template_of
from mmm.data.text.chat_tokens import ChatText, ChatTokens, PackedChats
from mmm.data.text.chats import Conversation, encode_chat, read_chats, rendered
from mmm.data.text.corpus import Corpus
from mmm.data.text.tokens import TokenArray, Tokens
from mmm.errors import ConfigError, DataError


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
