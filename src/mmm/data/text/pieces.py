"""Cuts files of text into pieces, and pieces into documents. What a piece holds depends on nothing outside it.

A text file is one document, or several with a separator between them. In JSON lines, each line is a document.
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
    """Bytes begin … end of a file.

    Attributes:
        path: the file.
        jsonl: whether it is JSON lines.
        begin: first byte.
        end: the byte after the last.
        last: whether a document ends with the piece.
    """

    path: Path
    jsonl: bool
    begin: int
    end: int
    last: bool


def split(files: Sequence[TextFile], size: int, separator: bytes = b"", splittable: bool = True) -> Iterator[Piece]:
    """Cut files into pieces of at least `size` bytes.

    If a file has several documents, a piece ends with a document, otherwise with a character.

    Args:
        separator: what stands between the documents of a text file; empty if a file is one document.
        splittable: whether a document may be split.
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
                ends_document = bool(end_mark) or end == len(text)
                yield Piece(path, jsonl, begin, end, ends_document)
                begin = end


def _after_documents(text: mmap.mmap, begin: int, size: int, separator: bytes) -> int:
    """The end of the first separator that ends at least `size` bytes after `begin`; else the end of the text.

    All separators from `begin` on are searched, as ``bytes.split`` finds them: of three line ends, the first two are
    the separator of two line ends.
    """
    end = begin
    while end < begin + size:
        place = text.find(separator, end)
        if place < 0:
            return len(text)
        end = place + len(separator)
    return end


def _after_character(text: mmap.mmap, end: int) -> int:
    """The end of the UTF-8 character that `end` is inside of."""
    # Bytes of a character after its first begin with the bits 10.
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end += 1
    return min(end, len(text))


def read_documents(piece: Piece, separator: bytes, field: str, utf8: bool) -> list[bytes]:
    """Read the documents of a piece as UTF-8; if the piece is a stretch of one document, that stretch.

    Empty documents are left out.

    Args:
        separator: what stands between documents; empty if a file is one document.
        field: the field of a JSON line that holds the text.
        utf8: whether text that is not UTF-8 is refused. If False, a text file may hold any bytes but NUL.

    Raises:
        DataError: a line has no such text, or there are bytes that are not UTF-8, or NUL.
    """
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        content = file.read(piece.end - piece.begin)
    text = check_text(content, piece.path, piece.begin, utf8 or piece.jsonl)
    if piece.jsonl:
        if piece.begin == 0:
            # A byte-order mark, which some editors write.
            text = text.removeprefix(b"\xef\xbb\xbf")
        documents = []
        for line_index, line in enumerate(text.split(b"\n")):
            if line.strip():
                documents.append(_text(piece, line_index, line, field))
    elif separator:
        documents = text.split(separator)
    else:
        documents = [text]
    return [document for document in documents if document]


def _text(piece: Piece, line_index: int, line: bytes, field: str) -> bytes:
    """The text in a line of JSON.

    Args:
        line_index: index of the line in its piece, from 0.
    """
    try:
        text = parse_json(line).get(field)
        if isinstance(text, str):
            return text.encode()
        reason = f"it has no text as {field!r}: name the field with the text by --field"
    except ValueError as error:
        reason = str(error)
    # The lines before the piece are counted only now, for the message.
    with piece.path.open("rb") as file:
        while file.tell() < piece.begin:
            file.readline()
            line_index += 1
    raise DataError(f"{piece.path}, line {line_index + 1}: {reason}")
