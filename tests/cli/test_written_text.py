"""What ``mmm sample`` writes: text as it comes, and bars."""

import io
import sys

import pytest

from mmm.cli.written_text import TextWriter
from mmm.data.text.byte_tokenizer import ByteTokenizer

END = 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def writer(bars, monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return TextWriter(ByteTokenizer(), (END,), bars)


def test_text_comes_with_each_token(monkeypatch):
    stdout = io.StringIO()
    written = writer(False, monkeypatch, stdout)
    seen = []
    written.begin(b"a")
    for token in b"\xc3\xb6b\x1b\xff\0":
        seen.append(stdout.getvalue())
        written.add(token, [])
    written.end()
    assert seen == ["a", "a", "aö", "aöb", "aöb\x1b", "aöb\x1b"]
    assert stdout.getvalue() == "aöb\x1b\ufffd\n"


BARS = """
  1 to
  >  75.0 % ######################         'n'
     12.5 % ####                           '\\n'
      0.0 %                                token 255

  2 ton
    100.0 % ############################## 'o'
  >                                        '\\x00'

ton
"""


@pytest.mark.parametrize("stdout", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_bars(monkeypatch, stdout):
    written = writer(True, monkeypatch, stdout)
    written.begin(b"x\nto")
    written.add(ord("n"), [(ord("n"), 0.75), (ord("\n"), 0.125), (255, 1e-5)])
    written.add(END, [(ord("o"), 1.0)])
    written.end()
    said = stdout.getvalue()
    assert said.replace("\x1b[1m", "").replace("\x1b[0m", "") == BARS.replace("\nton\n", "\nx\nton\n")
    assert said.count("\x1b[1m") == stdout.isatty()


def test_on_a_terminal_no_text_moves_the_cursor(monkeypatch):
    stdout = Terminal()
    written = writer(False, monkeypatch, stdout)
    written.begin(b"a\n\x1b[2Jb")
    written.end()
    assert stdout.getvalue() == "a\n\\x1b[2Jb\n"
