"""What a tokenizer is, and the one of bytes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.tokens import BYTES
from mmm.errors import ConfigError


class Tokenizer(ABC):
    """Tokens 0 … vocab_size - 1.

    Attributes:
        kind: bytes, chars, tokenizers or sentencepiece. vocab_size: tokens.
        content, file: what to keep beside tokens to decode them again, and its name; both empty for bytes.
        chat: how conversations are written for it; None where nobody says.
        notes: what a user is to know of it.
        splittable: a text may be split between any two characters and encodes to the same tokens.
    """

    kind: str
    vocab_size: int
    content = b""
    file = ""
    chat: ChatFormat | None = None
    notes: tuple[str, ...] = ()
    splittable = False

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a UTF-8 text, (tokens,), of an unsigned type; no special tokens are added.

        Raises:
            DataError: the text is no UTF-8, or has a character that the vocabulary lacks.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; a byte that is no UTF-8 becomes U+FFFD."""

    def token(self, name: str) -> int:
        """The number of a special token, such as ``<|endoftext|>``.

        Raises:
            ConfigError: the vocabulary has no such token.
        """
        raise ConfigError(f"the tokenizer {self.kind} has no token {name!r}")

    @property
    def sha256(self) -> str:
        """Of what decides the tokens: equal for equal tokenizers."""
        return hashlib.sha256(self.kind.encode() + b"\0" + self.content).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that every token fits in."""
        return np.min_scalar_type(self.vocab_size - 1).newbyteorder("<")

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
