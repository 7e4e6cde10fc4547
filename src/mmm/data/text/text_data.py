"""The tokens of a run: those to train on and those to validate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmm.data.text.tokens import Tokens


@dataclass(frozen=True)
class TextData:
    """Tokens to train on, tokens to validate on, and what the record says about them.

    Attributes:
        train: the tokens to train on.
        validation: the tokens to validate on.
        about: facts about the data for the run's record.
        bytes_per_token: average number of bytes of a token in the validation text; None if unknown.
        tokenizer: the tokenizer, a `mmm.data.text.byte_tokenizer.Tokenizer`; None if unknown.
    """

    train: Tokens
    validation: Tokens
    about: dict[str, object]
    bytes_per_token: float | None = None
    tokenizer: Any = None

    def describe(self) -> dict[str, object]:
        return self.about
