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

    def validation_notes(self, batches: int, global_batch_size: int) -> list[str]:
        """A note for people if the validation text has fewer global batches than are asked for."""
        available = self.validation.steps_per_epoch(global_batch_size)
        if available >= batches:
            return []
        return [f"validation: {available} global batches instead of {batches}, all that the text has"]
