"""What ``mmm sample`` writes to standard output: text as its tokens come, or at each step the likeliest of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.text_stream import INCOMPLETE, TextStream
from mmm.outside import printable, printable_lines

WIDTH = 30  # columns of a bar of 100 %
LINE = 70  # characters of the text before a token that are shown with it


class TextWriter:
    """On one rank.

    Args:
        ends: the tokens that end a text, and are none of it. bars: at each step the likeliest tokens, one a line, the
            drawn one marked; the text at the end. False: the text alone.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], bars: bool) -> None:
        self._tokenizer, self._ends, self._bars = tokenizer, ends, bars
        self._stream, self._text, self._steps = TextStream(tokenizer), "", 0
        # On a terminal a model's text moves no cursor; a pipe and a file get it as it is.
        self._terminal = sys.stdout.isatty()

    def begin(self, prompt: Sequence[int], is_part: bool = True) -> None:
        """
        Args:
            is_part: of the text that is written.
        """
        text = self._stream.add(prompt)
        if is_part:
            self._write(text)

    def add(self, token: int, likeliest: Sequence[tuple[int, float]]) -> None:
        """A token that has been drawn.

        Args:
            likeliest: as of `mmm.parallel.generate`, where there are to be bars.
        """
        self._steps += 1
        if self._bars:
            before = printable(self._text.rpartition("\n")[2][-LINE:])
            print(f"\n{self._steps:>3} {before}", *self._rows(token, likeliest), sep="\n", flush=True)
        if token not in self._ends:
            self._write(self._stream.add([token]))

    def end(self) -> None:
        """No more tokens come."""
        self._write(self._stream.add([], last=True))
        if self._bars:
            print(f"\n{printable_lines(self._text) if self._terminal else self._text}", end="")
        print(flush=True)

    def _write(self, text: str) -> None:
        self._text += text
        if not self._bars:
            print(printable_lines(text) if self._terminal else text, end="", flush=True)

    def _rows(self, token: int, likeliest: Sequence[tuple[int, float]]) -> list[str]:
        rows = []
        for each, probability in likeliest:
            bar = "#" * round(WIDTH * probability)
            mark = ">" if each == token else " "
            rows.append(f"  {mark} {100 * probability:5.1f} % {bar:<{WIDTH}} {self._name(each)}")
        if all(each != token for each, _ in likeliest):
            rows.append(f"  > {'':7} {'':{WIDTH}} {self._name(token)}")
        return rows

    def _name(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        return f"token {token}" if INCOMPLETE in text or not text else repr(text)
