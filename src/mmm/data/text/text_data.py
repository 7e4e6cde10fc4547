"""The tokens of a run: those to train on, and those to validate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmm.data.text.tokens import Tokens
from mmm.errors import DataError


@dataclass(frozen=True)
class TextData:
    """Tokens to train on, tokens to validate on, and what the record says of them.

    Attributes:
        bytes_per_token: of the text to validate on; None where nobody knows.
        tokenizer: a `mmm.data.text.byte_tokenizer.Tokenizer`; None where nobody knows.
    """

    train: Tokens
    validation: Tokens
    about: dict[str, object]
    bytes_per_token: float | None = None
    tokenizer: Any = None

    def describe(self) -> dict[str, object]:
        return self.about

    def check(self, global_batch_size: int) -> int:
        """Steps of an epoch.

        Raises:
            DataError: there is less text than one global batch, to train on or to validate on.
        """
        steps = self.train.steps_per_epoch(global_batch_size)
        try:
            self.validation.steps_per_epoch(global_batch_size)
        except DataError as error:
            raise DataError(f"the text's last tenth, for validation: {error}") from None
        return steps
