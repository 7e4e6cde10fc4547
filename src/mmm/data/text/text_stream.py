"""The text of tokens that come one after another."""

from __future__ import annotations

from collections.abc import Sequence

from mmm.data.text.byte_tokenizer import Tokenizer

# Decoders write it for bytes that are not a character, or only a part of one.
INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes tokens as they come. The returned texts, joined, are the text of all tokens.

    A token may hold only some of a character's bytes; its text waits for the rest. Not the whole text is decoded each
    time, only the tokens since the last text that was returned, and those of that text. The latter are needed because
    some decoders drop a space at the beginning: a token's text is the difference of two texts that begin alike.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # First the tokens of the text that was returned last, then those whose text waits.
        self._tokens: list[int] = []
        # How many of them have their text returned.
        self._done = 0

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens complete.

        Args:
            tokens: the next tokens.
            last: whether no more tokens come. Then an incomplete character is returned too, as U+FFFD.
        """
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[: self._done])
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._tokens = self._tokens[self._done :]
        self._done = len(self._tokens)
        return text[len(before) :]
