"""The journal of a preparation: a header, then a row for each piece, which says how far the files beside it are.

A row counts where the files bear it out: what follows the last one that does is written again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from mmm.outside import parse_json

Row = dict[str, Any]
COUNTS = ("tokens", "documents", "bytes", "file")  # up to and including the piece; `file`: the number of its file
NOTHING = dict.fromkeys(COUNTS, 0)
HASHES = ("sha256", "ends_sha256", "tokenizer_sha256")  # of the piece's tokens and of its documents' ends


class Progress:
    """Rows, in memory and on disk.

    Args:
        file: opened to append. A line that is no row, and all after it, is cut off.

    Attributes:
        rows: the header, then one for each piece.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.rows, self._ends = file, list[Row](), list[int]()
        end = 0
        file.seek(0)
        for line in file:
            try:
                row = parse_json(line[: line.index(b"\n")])
            except ValueError:  # not written to its end
                break
            if not (_is_row(row, self.rows[-1]) if self.rows else _is_header(row)):
                break
            end += len(line)
            self.rows.append(row if self.rows else row | NOTHING)
            self._ends.append(end)
        file.truncate(end)

    def append(self, row: Row) -> None:
        line = json.dumps(row).encode() + b"\n"
        self.file.write(line)
        self.file.flush()
        self.rows.append(row)
        self._ends.append(len(line) + (self._ends[-1] if self._ends else 0))

    def truncate(self, rows: int) -> None:
        """Keep so many."""
        del self.rows[rows:], self._ends[rows:]
        self.file.truncate(self._ends[-1] if self._ends else 0)

    def check(self, tokens: Path, documents: Path, width: int, tokenizer_sha256: str) -> int:
        """Cut off the rows that the files do not bear out: they end before, or have other tokens. Returns how many.

        Args:
            width: bytes of a token.
        """
        good, before = 1, self.rows[0]
        tokens.touch()
        documents.touch()
        with tokens.open("rb") as of_tokens, documents.open("rb") as of_documents:
            for row in self.rows[1:]:
                if (
                    row["tokenizer_sha256"] != tokenizer_sha256
                    or _sha256(of_tokens, before["tokens"] * width, row["tokens"] * width) != row["sha256"]
                    or _sha256(of_documents, before["documents"] * 8, row["documents"] * 8) != row["ends_sha256"]
                ):
                    break
                good, before = good + 1, row
        lost = len(self.rows) - good
        self.truncate(good)
        return lost


def _is_header(row: Row) -> bool:
    return isinstance(row.get("key"), str) and isinstance(row.get("files", []), list)


def _is_row(row: Row, before: Row) -> bool:
    return all(type(row.get(name)) is int and row[name] >= before[name] for name in COUNTS) and all(
        isinstance(row.get(name), str) for name in HASHES
    )


def _sha256(file: BinaryIO, begin: int, end: int) -> str | None:
    """Of bytes begin … end; None where the file ends before."""
    if file.seek(0, 2) < end:
        return None
    digest = hashlib.sha256()
    file.seek(begin)
    while begin < end:
        digest.update(chunk := file.read(min(1 << 20, end - begin)))
        begin += len(chunk)
    return digest.hexdigest()
