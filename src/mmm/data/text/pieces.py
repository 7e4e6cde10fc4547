"""Files of text in pieces, and the documents of each: what a piece has depends on nothing else.

A file of text is a document, or several with a separator between them; of JSON lines, each line is one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mmm.data.text.corpus import check_text
from mmm.errors import DataError
from mmm.outside import parse_json


class TextFile(NamedTuple):
    """A file, and whether it is JSON lines."""

    path: Path
    jsonl: bool


class Piece(NamedTuple):
    """Bytes begin … end of a file; `last` where a document ends with it."""

    path: Path
    jsonl: bool
    begin: int
    end: int
    last: bool


def split(files: Sequence[TextFile], size: int, separator: bytes = b"", splittable: bool = True) -> Iterator[Piece]:
    """Pieces of `size` bytes at least: they end with a document, where a file has several; else with a character.

    Args:
        splittable: a document may be split.
    """
    for path, jsonl in files:
        end_mark = b"\n" if jsonl else separator
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            begin = 0
            while begin < len(text):
                end = len(text)
                if end_mark:
                    end = _after_documents(text, begin, size, end_mark)
                elif splittable:
                    end = _after_character(text, begin + size)
                yield Piece(path, jsonl, begin, end, bool(end_mark) or end == len(text))
                begin = end


def _after_documents(text: mmap.mmap, begin: int, size: int, separator: bytes) -> int:
    """The end of the first separator that `size` bytes after `begin` are before. Each is looked for, from a document's
    begin: of three line ends the first two are the separator of two."""
    end = begin
    while end < begin + size:
        place = text.find(separator, end)
        if place < 0:
            return len(text)
        end = place + len(separator)
    return end


def _after_character(text: mmap.mmap, end: int) -> int:
    """The end of the character of UTF-8 that `end` is inside of."""
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end += 1
    return min(end, len(text))


def read_documents(piece: Piece, separator: bytes, field: str, utf8: bool) -> list[bytes]:
    """The documents of a piece that have text, or the piece of one, as UTF-8.

    Args:
        field: of JSON lines, what has the text. utf8: other text is refused; else every byte is one.

    Raises:
        DataError: a line has no such text; bytes that are not UTF-8, or NUL.
    """
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        text = check_text(file.read(piece.end - piece.begin), piece.path, piece.begin, utf8 or piece.jsonl)
    documents = text.split(separator) if separator else [text]
    if piece.jsonl:
        if not piece.begin:
            text = text.removeprefix(b"\xef\xbb\xbf")
        lines = enumerate(text.split(b"\n"))
        documents = [_text(piece, number, line, field) for number, line in lines if line.strip()]
    return [document for document in documents if document]


def _text(piece: Piece, number: int, line: bytes, field: str) -> bytes:
    """Of a line of JSON. number: of the line, from 0 in its piece."""
    try:
        text = parse_json(line).get(field)
        if isinstance(text, str):
            return text.encode()
        reason = f"it has no text as {field!r}: name the field with the text by --field"
    except ValueError as error:
        reason = str(error)
    with piece.path.open("rb") as file:
        while file.tell() < piece.begin:
            file.readline()
            number += 1
    raise DataError(f"{piece.path}, line {number + 1}: {reason}")
