"""What a file is: text, JSON lines, or of a format that is refused by its name or its first bytes, in UTF-8 alone."""

import bz2
import gzip
import lzma

import pytest

from mmm.data.text.corpus import read_text_files
from mmm.data.text.formats import check_text_file
from mmm.errors import DataError

TEXT = "Grüße aus Köln.\nZweite Zeile.\n" * 20
LINES = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content", "jsonl"),
    [
        ("a.txt", TEXT, False),
        ("a.jsonl", LINES, True),
        ("A.JSONL", LINES, True),
        ("a.ndjson", LINES, True),
        ("a.json", LINES, True),
        ("a.json", "\ufeff\n" + LINES, True),
        ("a.json", '{"text": "one"}', True),
        ("a.py", "{1: 2}\n", False),
        ("a", "{ a set", False),
        ("a.txt", LINES, False),
    ],
)
def test_text_and_json_lines(tmp_path, name, content, jsonl):
    path = tmp_path / name
    path.write_text(content)
    assert check_text_file(path, name) is jsonl
    assert check_text_file(path, name, as_it_is=True) is False


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "a.txt"),
        ("a.txt", TEXT.encode("utf-16-le"), "iconv -f UTF-16"),
        ("a.jsonl", LINES.encode("utf-16"), "iconv -f UTF-16"),
        ("a.txt", gzip.compress(TEXT.encode(), mtime=0), "is gzip, by its first bytes"),
        ("a.jsonl", gzip.compress(LINES.encode(), mtime=0), "is gzip"),
        ("a.txt", bz2.compress(TEXT.encode()), "is bzip2"),
        ("a.txt", lzma.compress(TEXT.encode()), "is xz"),
        ("a", b"ARROW1\0\0some", "is Arrow, by its first bytes"),
        ("a.BIN", b"some bytes", "is a file of tokens, by its name, not text"),
        ("a.idx", b"some bytes", "is a file of tokens"),
        ("a.csv", "text,label\nsome,1\n", "a.csv"),
    ],
)
def test_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        check_text_file(path, name)
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_what_a_program_takes(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"a" * 40 + b"\xff")
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(DataError, match=r"b.txt"):
        read_text_files([tmp_path / "a.txt", tmp_path / "b.txt"], utf8=True)
    assert len(read_text_files([tmp_path / "b.txt"]).train) == 37
