"""What ``mmm sample`` writes: text as it comes, and bars."""

import io
import sys

from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm_lab.cli.written_text import TextWriter

END = 0


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
