"""Text of tokens that come one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from mmm.data.text.byte_tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what decoders make of bytes that are no character, or a part of one


class TextStream:
    """What tokens add to a text. All that is returned, joined, is the text of all tokens.

    A token may have a part of a character's bytes: it waits for the rest. Decoded are the tokens since the last
    character but one token, not the whole text: some decoders take a space from its begin, so that the text which a
    token adds is the difference of two texts that begin alike.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[
            int
        ] = []  # those whose text is out, of the last call that returned any; then those that wait
        self._done = 0  # of them, tokens whose text is out

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that is complete with these tokens.

        Args:
            last: no more come: what is not complete is returned as well.
        """
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[: self._done])
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._tokens, self._done = self._tokens[self._done :], len(self._tokens) - self._done
        return text[len(before) :]
