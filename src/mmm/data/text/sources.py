"""Opens what ``--text`` and ``--tokenizer`` name: texts, conversations, or a folder or file of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmm.data.text.byte_tokenizer import ByteTokenizer, Tokenizer
from mmm.data.text.chat_tokens import ChatText, ChatTokens, encode_chats, read_chat_files
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.documents import FileTokens, PackedTokens, check_vocabulary
from mmm.data.text.formats import check_text_file
from mmm.data.text.token_file import TokenFile, open_tokens
from mmm.data.text.tokenizer import CharTokenizer, load_tokenizer
from mmm.data.text.tokens import TextTokens, Tokens
from mmm.errors import ConfigError, DataError


@dataclass(frozen=True)
class Sources:
    """A corpus, opened.

    Attributes:
        corpus: the corpus.
        tokenizer: the tokenizer of its tokens; None if no file says which.
    """

    corpus: Corpus
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float | None:
        return self.corpus.bytes_per_token

    def describe(self) -> dict[str, object]:
        """The facts about the data that a run's record keeps."""
        return self.corpus.describe()

    def tokens(
        self,
        seq_length: int,
        seed: int,
        vocab_size: int,
        pack: bool = False,
        document_mask: bool = False,
    ) -> tuple[Tokens, Tokens]:
        """Make the samples to train on, in an order that depends on the seed, and those to validate on, in order.

        Args:
            seq_length: number of tokens in a sample.
            seed: seed of the order.
            vocab_size: size of the model's vocabulary.
            pack: whether samples hold whole documents (`PackedTokens`).
            document_mask: whether samples say where their documents begin.

        Raises:
            ConfigError: `pack` is given for a text that does not say where documents end; `document_mask` is given
                without `pack`.
            DataError: a text is shorter than a sequence, or has tokens outside the vocabulary.
        """
        if document_mask and not pack:
            raise ConfigError("--document_mask is for documents that --pack puts into a sequence: give --pack as well")
        corpus = self.corpus

        # For training or for validation.
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
            check_vocabulary(corpus.source, text, vocab_size)
            return TextTokens(text, *order, unit=corpus.unit)

        return samples(corpus.train, shuffle=True), samples(corpus.validation, shuffle=False)

    def notes(self, seq_length: int) -> list[str]:
        """Remarks about the data for the start of a run."""
        corpus = self.corpus
        notes: list[str] = []
        if isinstance(corpus.train, ChatText):
            notes.append(f"{corpus.source}, to train on: {corpus.train.note(seq_length)}")
            notes.append(f"{corpus.source}, to validate on: {corpus.validation.note(seq_length)}")
        notes += corpus.notes
        return notes


def open_sources(
    text: Sequence[Path] = (),
    tokenizer: str | None = None,
    default: Callable[[], Tokenizer | None] = lambda: None,
    token_dtype: str | None = None,
) -> Sources:
    """Open the data that the flags name.

    Args:
        text: a folder or file of tokens, or files of text or of conversations, which together are one text. Empty for
            the standard library.
        tokenizer: ``bytes``, ``chars`` (the characters of the texts) or a tokenizer's file. None: the tokenizer of the
            tokens; for texts that of `default`, or that of bytes.
        default: returns the tokenizer for texts if none is named.
        token_dtype: type of a token in a file that does not say it, such as ``uint16``.

    Raises:
        ConfigError, DataError: flags do not fit together, or data cannot be read.
    """
    # Tokens are recognised first, by their names; any other file is text, or conversations.
    for path in text:
        tokens = open_tokens(path, token_dtype)
        if tokens is None:
            continue
        if len(text) > 1:
            raise ConfigError(
                f"--text: {path} has tokens, and must be the only one: mmm tokens makes one folder of many texts, and "
                "--text_weights blends several"
            )
        return Sources(tokens, _tokenizer_of(tokens, tokenizer))
    kinds = {check_text_file(path, f"--text {path}") for path in text}
    if len(kinds) > 1:
        raise ConfigError("--text: some files are conversations and others text: train on one kind of them")
    # None: characters, which are made of the text below.
    chosen: Tokenizer | None = None
    if tokenizer is None:
        chosen = default() or ByteTokenizer()
    elif tokenizer != CharTokenizer.kind:
        chosen = load_tokenizer(tokenizer)
    if True in kinds:
        if chosen is None or chosen.splittable:
            raise DataError(
                f"--text {text[0]}: conversations need a tokenizer with special tokens, and bytes and chars have none: "
                f"give --tokenizer tokenizer.json, or --init_from weights that have one"
            )
        return Sources(encode_chats(text, read_chat_files(text), chosen), chosen)
    if text:
        # The tokenizer of bytes takes any text, others only UTF-8.
        utf8 = chosen is None or chosen.kind != ByteTokenizer.kind
        corpus = read_text_files(text, utf8)
    else:
        corpus = standard_library()
    if chosen is None:
        chosen = CharTokenizer.of((corpus.train.tobytes(), corpus.validation.tobytes()))
    if chosen.kind != ByteTokenizer.kind:
        corpus = _encoded(corpus, chosen)
    return Sources(corpus, chosen)


def _tokenizer_of(tokens: Corpus, name: str | None) -> Tokenizer | None:
    """The tokenizer of a folder or file of tokens; None if it is unknown.

    Args:
        name: the tokenizer that the user asks for; None for the one that made the tokens.

    Raises:
        DataError: the tokens have a tokenizer of their own.
    """
    own = tokens.tokenizer
    if own is None:
        if name is None:
            return None
        if name == CharTokenizer.kind:
            raise DataError(f"--tokenizer {name}: {tokens.source} has no text to take characters from")
        return load_tokenizer(name)
    if name not in (None, own.kind):
        raise DataError(
            f"--text {tokens.source} has its own tokenizer ({own}): leave --tokenizer {name} out, or prepare the text "
            "again with mmm tokens --tokenizer"
        )
    return own


def _encoded(text: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Encode a text of bytes by another tokenizer, in memory.

    Raises:
        DataError: the text has a character that is not in the vocabulary.
    """
    try:
        train = tokenizer.encode(text.train.tobytes())
        validation = tokenizer.encode(text.validation.tobytes())
    except DataError as error:
        raise DataError(f"{text.source}: {error}") from None
    both = f"{text.sha256} {tokenizer.sha256}"
    return replace(
        text,
        train=train,
        validation=validation,
        sha256=hashlib.sha256(both.encode()).hexdigest(),
        unit="tokens",
        tokenizer=tokenizer,
        bytes_per_token=len(text.validation) / max(len(validation), 1),
    )
