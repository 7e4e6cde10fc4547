"""What ``--text`` and ``--tokenizer`` name: texts, conversations, or a folder or file of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.chat_tokens import ChatText, ChatTokens, encode_chats, plain_texts, read_chat_files
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.documents import FileTokens, PackedTokens
from mmm.data.text.formats import is_chats
from mmm.data.text.token_file import TokenFile, open_tokens
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer
from mmm.data.text.tokens import TextTokens, Tokens
from mmm.errors import ConfigError, DataError


@dataclass(frozen=True)
class Sources:
    """A corpus, opened.

    Attributes:
        tokenizer: that its tokens are of; None where no file says.
    """

    corpus: Corpus
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def is_bytes(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.kind == ByteTokenizer.kind

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text to validate on, a token; None where the corpus does not say."""
        return self.corpus.bytes_per_token

    def tokens(
        self, seq_length: int, seed: int, vocab_size: int, pack: bool = False, document_mask: bool = False
    ) -> tuple[Tokens, Tokens]:
        """To train on, in an order that depends on the seed, and to validate on, in order.

        Args:
            pack: whole documents (`PackedTokens`). document_mask: with where they begin.

        Raises:
            ConfigError: a text does not say where documents end, and is to be packed; a mask of what is not packed.
            DataError: a text is shorter than a sequence, or has tokens that the vocabulary lacks.
        """
        if document_mask and not pack:
            raise ConfigError("--document_mask is of documents that --pack puts into a sequence: give --pack as well")
        corpus = self.corpus

        def samples(text: Any, shuffle: bool) -> Tokens:
            order = (seq_length, seed, shuffle)
            if isinstance(text, ChatText):
                chats = text.cut(seq_length)
                return ChatTokens(chats, *order, vocab_size=vocab_size, pack=pack, document_starts=document_mask)
            if pack:
                if corpus.documents is None:
                    raise ConfigError(
                        f"--pack: {corpus.source} does not say where documents end: prepare its texts by mmm tokens"
                    )
                ends = corpus.documents()
                return PackedTokens(text, ends, *order, vocab_size=vocab_size, document_starts=document_mask)
            if isinstance(text, TokenFile):
                return FileTokens(text, *order, vocab_size=vocab_size)
            return TextTokens(text, *order, unit=corpus.unit)

        return samples(corpus.train, shuffle=True), samples(corpus.validation, shuffle=False)

    def notes(self, seq_length: int) -> list[str]:
        """What is to be said of the data at the start of a run."""
        corpus = self.corpus
        notes = list(self.tokenizer.notes) if self.tokenizer else []
        if isinstance(corpus.train, ChatText):
            notes.append(f"{corpus.source}, to train on: {corpus.train.note(seq_length)}")
            notes.append(f"{corpus.source}, to validate on: {corpus.validation.note(seq_length)}")
        return [*notes, *corpus.notes]

    def describe(self) -> dict[str, object]:
        """What a run's record keeps of the data."""
        return self.corpus.describe()


def open_sources(
    text: Sequence[Path] = (),
    tokenizer: str | None = None,
    default: Callable[[], Tokenizer | None] = lambda: None,
    token_dtype: str | None = None,
) -> Sources:
    """Open the data that the flags name.

    Args:
        text: a folder or file of tokens; or files of text, or of conversations, which together are one text; none for
            the standard library.
        tokenizer: bytes, chars (the characters of the texts) or a tokenizer's file. None: that of the tokens, else
            `default`, else bytes.
        token_dtype: of a file of tokens that does not say it, such as ``uint16``.

    Raises:
        ConfigError, DataError: what does not fit together, or cannot be read.
    """
    for path in text:
        tokens = open_tokens(path, token_dtype)
        if tokens is None:
            continue
        if len(text) > 1:
            raise ConfigError(f"--text: {path} has tokens, and stands alone: mmm tokens makes one folder of many texts")
        return Sources(tokens, _tokenizer_of(tokens, tokenizer))
    of_chats = {is_chats(path) for path in text}
    if len(of_chats) > 1:
        raise ConfigError("--text: some files are conversations and others text: train on one kind of them")
    chosen = None
    if tokenizer is None:
        chosen = default() or ByteTokenizer()
    elif tokenizer != CharTokenizer.kind:
        chosen = load_tokenizer(tokenizer)
    if True in of_chats:
        chats = read_chat_files(text)
        chosen = chosen or CharTokenizer.of(plain_texts(chats))
        return Sources(encode_chats(text, chats, chosen), chosen)
    utf8 = chosen is None or chosen.kind != ByteTokenizer.kind
    corpus = read_text_files(text, utf8) if text else standard_library()
    chosen = chosen or CharTokenizer.of((corpus.train.tobytes(), corpus.validation.tobytes()))
    if chosen.kind != ByteTokenizer.kind:
        corpus = _encoded(corpus, chosen)
    return Sources(corpus, chosen)


def _tokenizer_of(tokens: Corpus, name: str | None) -> Tokenizer | None:
    """The tokenizer that is asked for, or else that has made the tokens; None where nobody says.

    Raises:
        DataError: they differ.
    """
    own = tokens.tokenizer
    if name is None or (own is not None and own.kind == name):
        return own
    if name == CharTokenizer.kind and own is None:
        raise DataError(f"--tokenizer {name}: {tokens.source} has no text to take characters from")
    asked = own if name == CharTokenizer.kind else load_tokenizer(name)
    if asked is own or (own is not None and asked is not None and asked.sha256 != own.sha256):
        raise DataError(
            f"--text {tokens.source} was made by another tokenizer ({own}) than --tokenizer {name}: prepare it again "
            "with mmm tokens --tokenizer, or leave --tokenizer out"
        )
    return asked


def _encoded(text: Corpus, tokenizer: Tokenizer) -> Corpus:
    """A text of bytes as the tokens of another tokenizer, in memory.

    Raises:
        DataError: the text has a character that the vocabulary lacks.
    """
    try:
        train = tokenizer.encode(text.train.tobytes())
        validation = tokenizer.encode(text.validation.tobytes())
    except DataError as error:
        raise DataError(f"{text.source}: {error}") from None
    return replace(
        text,
        train=train,
        validation=validation,
        sha256=hashlib.sha256(f"{text.sha256} {tokenizer.sha256}".encode()).hexdigest(),
        unit="tokens",
        tokenizer=tokenizer,
        bytes_per_token=len(text.validation) / max(len(validation), 1),
    )
