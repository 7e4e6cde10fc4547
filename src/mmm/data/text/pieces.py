"""Files of text in pieces, and the documents of each: what a piece has depends on nothing else.

A file of text is a document, or several with a separator between them; of JSON lines, each line is one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mmm.data.text.corpus import check_text, check_utf8
from mmm.errors import DataError
from mmm.outside import parse_json


class TextFile(NamedTuple):
    """A file, and whether it is JSON lines."""

    path: Path
    jsonl: bool


class Piece(NamedTuple):
    """Bytes begin … end of a file, and the file's number; `last` where a document ends with it."""

    file: int
    text_file: TextFile
    begin: int
    end: int
    last: bool

    @property
    def path(self) -> Path:
        return self.text_file.path


def split(files: Sequence[TextFile], size: int, separator: bytes = b"", splittable: bool = True) -> Iterator[Piece]:
    """Pieces of `size` bytes at least: they end with a document, where a file has several; else with a character.

    Args:
        splittable: a document may be split.
    """
    for number, text_file in enumerate(files):
        length, end_mark = text_file.path.stat().st_size, b"\n" if text_file.jsonl else separator
        with text_file.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            begin = 0
            while begin < length:
                end = min(begin + size, length) if end_mark or splittable else length
                if end < length:
                    end = _after_separator(text, begin, end, end_mark) if end_mark else _after_character(text, end)
                yield Piece(number, text_file, begin, end, bool(end_mark) or end == length)
                begin = end


def _after_separator(text: mmap.mmap, begin: int, end: int, separator: bytes) -> int:
    """The end of a separator after `end`, as they are counted from `begin`, which is a document's: of three line ends
    the first two are the separator of two, also where a piece of that many bytes would end between them."""
    if any(separator.endswith(separator[:size]) for size in range(1, len(separator))):  # two can overlap
        end -= len(text[begin:end].split(separator)[-1])
    found = text.find(separator, end)
    return len(text) if found < 0 else found + len(separator)


def _after_character(text: mmap.mmap, end: int) -> int:
    """The end of the character of UTF-8 that `end` is inside of; where that is none, `end`."""
    after = range(end, min(end + 4, len(text)))
    return next((at for at in after if text[at] & 0xC0 != 0x80), end if len(after) == 4 else len(text))


def read_documents(piece: Piece, separator: bytes, field: str, utf8: bool) -> list[bytes]:
    """The documents of a piece that have text, or the piece of one, as UTF-8.

    Args:
        field: of JSON lines, what has the text. utf8: other text is refused; else every byte is one.

    Raises:
        DataError: a line has no such text; bytes that are not UTF-8, or NUL.
    """
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        text = check_text(file.read(piece.end - piece.begin), piece.path, piece.begin)
    if piece.text_file.jsonl:
        check_utf8(text, piece.path, piece.begin, advice="")  # as JSON is, whatever the tokenizer
    elif utf8:
        check_utf8(text, piece.path, piece.begin)
    if piece.text_file.jsonl:
        lines = enumerate(text.removeprefix(b"" if piece.begin else b"\xef\xbb\xbf").split(b"\n"))
        found = [_text(piece, number, line, field) for number, line in lines if line.strip()]
    else:
        found = text.split(separator) if separator else [text]
    return [each for each in found if each]


def _text(piece: Piece, number: int, line: bytes, field: str) -> bytes:
    """Of a line of JSON. number: of the line, from 0 in its piece."""
    try:
        text = parse_json(line).get(field)
        if isinstance(text, str):
            return text.encode()
    except ValueError as error:
        raise _refused(piece, number, str(error)) from None
    raise _refused(piece, number, f"it has no text as {field!r}: name the field with the text by --field")


def _refused(piece: Piece, number: int, reason: str) -> DataError:
    with piece.path.open("rb") as file:
        before, left = 0, piece.begin
        while left:
            chunk = file.read(min(1 << 24, left))
            before += chunk.count(b"\n")
            left -= len(chunk)
    return DataError(f"{piece.path}, line {before + number + 1}: {reason}")
