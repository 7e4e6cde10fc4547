"""The base class of tokenizers, and the tokenizer of bytes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.tokens import BYTES
from mmm.errors import ConfigError


class Tokenizer(ABC):
    """Turns text into tokens 0 … vocab_size - 1 and back.

    Attributes:
        kind: ``bytes``, ``chars``, ``tokenizers`` or ``sentencepiece``.
        vocab_size: number of tokens.
        content: the tokenizer's file, kept with tokens so that they can be decoded again; empty for bytes.
        file: name for that file; empty for bytes.
        chat: how conversations are written for it; None if unknown.
        special: special tokens, such as ``<|im_end|>``, as a text has them.
        bos: the tokens that its file puts before each text; `encode` does not.
        splittable: whether a text may be split between any two characters and still has the same tokens.
    """

    kind: str
    vocab_size: int
    content = b""
    file = ""
    chat: ChatFormat | None = None
    special: tuple[str, ...] = ()
    bos: tuple[int, ...] = ()
    splittable = False

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a UTF-8 text, (tokens,), of an unsigned type. No special tokens are added.

        Raises:
            DataError: the text is not UTF-8, or has a character that is not in the vocabulary.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. Bytes that are not UTF-8 become U+FFFD."""

    def token(self, name: str) -> int:
        """The token id of a special token, such as ``<|endoftext|>``.

        Raises:
            ConfigError: the vocabulary has no such token.
        """
        raise ConfigError(f"the tokenizer {self.kind} has no token {name!r}")

    @property
    def sha256(self) -> str:
        """SHA-256 of what determines the tokens; equal for equal tokenizers."""
        # The kind too: a file may be valid for two kinds.
        content = self.kind.encode() + b"\0" + self.content
        return hashlib.sha256(content).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that every token fits in, little-endian."""
        largest = self.vocab_size - 1
        return np.min_scalar_type(largest).newbyteorder("<")

    def __str__(self) -> str:
        return f"{self.kind}, {self.vocab_size} tokens"


class ByteTokenizer(Tokenizer):
    """A byte is a token: every text can be encoded."""

    kind = "bytes"
    vocab_size = BYTES
    splittable = True

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")
