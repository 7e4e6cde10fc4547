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
    """Writes the text, on one rank.

    Args:
        ends: the tokens that end a text. They are not written.
        bars: show at each step the likeliest tokens, one a line, the drawn one marked, and the text at the end. False:
            only the text.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], bars: bool) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._bars = bars
        self._stream = TextStream(tokenizer)
        self._text = ""
        self._steps = 0
        # On a terminal a model's text moves no cursor; a pipe and a file get it as it is.
        self._terminal = sys.stdout.isatty()

    def begin(self, prompt: Sequence[int], is_shown: bool = True) -> None:
        """Take the tokens before the first one that is drawn.

        Args:
            is_shown: write the prompt, too.
        """
        # The stream needs it either way: a character may begin in the prompt and end in the first token.
        text = self._stream.add(prompt)
        if is_shown:
            self._write(text)

    def add(self, token: int, likeliest: Sequence[tuple[int, float]]) -> None:
        """Write a token that has been drawn.

        Args:
            likeliest: tokens with their probabilities, as of `mmm.parallel.generate`; empty without bars.
        """
        self._steps += 1
        if self._bars:
            # The end of the text so far, in one line.
            _, _, last_line = self._text.rpartition("\n")
            last_line = last_line[-LINE:]
            before = printable(last_line)
            rows = self._rows(token, likeliest)
            print(f"\n{self._steps:>3} {before}", *rows, sep="\n", flush=True)
        if token not in self._ends:
            self._write(self._stream.add([token]))

    def end(self) -> None:
        """Write what is left: no more tokens come."""
        self._write(self._stream.add([], last=True))
        if self._bars:
            print(f"\n{self._on_terminal(self._text)}", end="")
        print(flush=True)

    def _write(self, text: str) -> None:
        self._text += text
        if not self._bars:
            print(self._on_terminal(text), end="", flush=True)

    def _on_terminal(self, text: str) -> str:
        if self._terminal:
            return printable_lines(text)
        return text

    def _rows(self, drawn: int, likeliest: Sequence[tuple[int, float]]) -> list[str]:
        rows = []
        for token, probability in likeliest:
            mark = " "
            if token == drawn:
                mark = ">"
            percent = f"{100 * probability:5.1f} %"
            bar = "#" * round(WIDTH * probability)
            rows.append(f"  {mark} {percent} {bar:<{WIDTH}} {self._name(token)}")
        # It may be less likely than all of them; then it has no bar.
        if drawn not in [token for token, _ in likeliest]:
            rows.append(f"  > {'':7} {'':{WIDTH}} {self._name(drawn)}")
        return rows

    def _name(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        # Of a piece of a character, or of nothing, the number says more.
        if INCOMPLETE in text or not text:
            return f"token {token}"
        return repr(text)
