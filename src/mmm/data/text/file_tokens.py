"""Sequences of a file of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmm.data.order import permuted
from mmm.data.text.token_file import TokenFile
from mmm.data.text.tokens import TextTokens
from mmm.errors import DataError


class FileTokens(TextTokens):
    """As `TextTokens`, of a file of tokens that may have 10¹² of them: the order is computed, place by place.

    Args:
        vocab_size: of the model: a token that it lacks is refused when it is read.

    Raises:
        DataError: as of `TextTokens`; the first or the last sample has a token that the vocabulary lacks.
    """

    def __init__(
        self, text: TokenFile, seq_length: int, seed: int, shuffle: bool = True, *, vocab_size: int = 1 << 63
    ) -> None:
        super().__init__(text, seq_length, seed, shuffle, unit="tokens")
        self.path, self.vocab_size = text.path, vocab_size
        for number in (0, self.samples - 1):
            check_vocabulary(self.path, text[number * seq_length : (number + 1) * seq_length], vocab_size)

    def shuffled(self, epoch: int, place: int) -> int:
        return permuted(place, self.samples, self.seed, epoch)

    def sample(self, epoch: int, place: int) -> np.ndarray:
        row = super().sample(epoch, place)
        check_vocabulary(self.path, row, self.vocab_size)
        return row


def check_vocabulary(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataError where tokens of a file are not in the vocabulary."""
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab_size:
            raise DataError(
                f"{path} has token {token}, and the model's vocabulary ends at {vocab_size - 1}: "
                f"give the --tokenizer that made the file, or its --vocab_size"
            )
