"""The journal: a file next to the dataset to which rows are appended, so that a killed run keeps what it measured.

The first line is a header (version, ranks, attributes, writing process); each further line is a row with its draw. A
line that a kill has truncated is not a JSON object, so a reader recognises it. Any other line that is not a row of this
run, whatever the reason, ends the reading, and the record says which line it is and why (`LEFT_OUT`).

Rows reach the operating system at each append: they survive the process, but not a power failure.
"""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from mmm.errors import RecordError
from mmm.history.record.folder import cannot_write, reason, write_atomically
from mmm.outside import LARGEST, Lock, lock, open_file, parse_json, printable, short

VERSION = 1

# Attribute of the dataset that says why the reading of a journal ended before its end.
LEFT_OUT = "left_out"
INT64_MAX = 2**63 - 1

# The most bytes of a row's line.
LONGEST_ROW = 1 << 24
log = logging.getLogger("mmm")


class LoggedRow(NamedTuple):
    """One logged row.

    Attributes:
        draw: index of the row in the record.
        row: name → value.
        per_rank: name → one value for each rank.
    """

    draw: int
    row: dict[str, float | int]
    per_rank: dict[str, list[float | int]]


class Header(NamedTuple):
    """The first line of a journal.

    Attributes:
        ranks: name → value of the coordinates of each rank.
        attrs: attributes of the dataset.
        writer: the process that writes the journal (`this_process`); empty in older journals.
    """

    ranks: list[dict[str, Any]]
    attrs: dict[str, Any]
    writer: Mapping[str, Any] = MappingProxyType({})


class JournalContents(NamedTuple):
    """The content of a journal.

    Attributes:
        header: its first line.
        rows: its rows.
        size: number of bytes that were read.
        left_out: why the rest was not read; empty if all was.
    """

    header: Header
    rows: list[LoggedRow]
    size: int
    left_out: str = ""


def this_process() -> dict[str, Any]:
    """Return what a journal's header says about its writer."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


class Journal:
    """The writing side of a journal. It holds an advisory lock on the file while it is open.

    On a file system without locks, a user may take the run for a killed one and finalize it. So each write checks that
    the file is there, and restores it if not.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._fd = -1
        self._lock = Lock.LOCKED
        self._start(header)
        # A reader on another host may have locks where this one has none: the header is written again to say so.
        if self._lock is Lock.NONE:
            self._start(header)

    def _start(self, header: Header) -> None:
        """Write a journal without rows."""
        self._writer = this_process() | {"locks": self._lock is not Lock.NONE}
        fields = {
            "mmm_journal": VERSION,
            "ranks": header.ranks,
            "attrs": header.attrs,
            "writer": self._writer,
        }
        self._first = json.dumps(fields).encode() + b"\n"
        self._make(self._first)

    def _make(self, content: bytes) -> None:
        """Put a file with some content in place, and open it. A reader always finds a complete header."""
        write_atomically(self.path, content)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self.close()
        self._fd = fd
        self._size = len(content)
        self._lock = lock(fd)

    def append(self, rows: list[LoggedRow]) -> None:
        """Write `rows`, all or none of them.

        Raises:
            RecordError: they cannot be written. It names the path, the reason and the free bytes.
        """
        self.ensure()
        content = b""
        for row in rows:
            content += json.dumps(row._asdict()).encode() + b"\n"
        unwritten = memoryview(content)
        try:
            while unwritten:
                written = os.write(self._fd, unwritten)
                unwritten = unwritten[written:]
            self._size += len(content)
        except OSError as error:
            # The next append must not follow a truncated line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise cannot_write(self.path, error) from error

    def ensure(self) -> None:
        """Restore the file, with its rows, if it has been removed.

        Raises:
            RecordError: it cannot be restored, or another run's journal is in its place.
        """
        if self._in_place():
            # A reader that looked for a writer may have had the lock when the file was opened.
            if self._lock is Lock.TAKEN:
                self._lock = lock(self._fd)
            return
        other = read_journal(self.path)
        if other is not None and other.header.writer != self._writer:
            raise RecordError(
                f"{self.path} is another run's journal now: two runs cannot keep one record. "
                "The rows since the last write are not kept; give each run a folder of its own."
            )
        content = self._read_back()
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._make(content)
        n_rows = content.count(b"\n") - 1
        log.warning("%s was removed during the run: it was written again, with %d rows", self.path, n_rows)

    def _in_place(self) -> bool:
        """Whether the file at the journal's path is still the one that is open."""
        try:
            opened = os.fstat(self._fd)
            current = os.stat(self.path)
        except OSError:
            # The file was removed, or NFS has lost it.
            return False
        return opened.st_nlink > 0 and (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)

    def _read_back(self) -> bytes:
        """Read all that was written from the removed file, which is still open; only the header if that fails."""
        try:
            content = os.pread(self._fd, self._size, 0)
        except OSError:
            return self._first
        return content if len(content) == self._size else self._first

    def close(self) -> None:
        """Close the file, and so release its lock."""
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            with contextlib.suppress(OSError):
                os.close(fd)


def read_journal(path: Path) -> JournalContents | None:
    """Read the header of a journal, and its rows up to the first line that is not a row; None if there is no file.

    A truncated last line is left out. Any other line that is not a row ends the reading, with a warning that says why.

    Raises:
        RecordError: the file cannot be read, or its first line is not a journal's header.
    """
    try:
        with open_file(path) as file:
            return _read(path, file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {reason(error)}.") from error


def _read(path: Path, file: BinaryIO) -> JournalContents:
    first = file.readline(LARGEST)
    header = _header(path, first.rstrip(b"\n"))
    taken = taken_names(header.ranks)
    rows: list[LoggedRow] = []
    left_out = ""
    size = len(first)
    # One line at a time, and no more of it than a row may have: a damaged line may be as long as the file.
    lines = iter(partial(file.readline, LONGEST_ROW), b"")
    for line_number, line in enumerate(lines, start=2):
        size += len(line)
        try:
            row = _row(line, taken, len(header.ranks))
            if rows and row.draw != rows[-1].draw + 1:
                raise ValueError(f"its draw {row.draw} does not follow {rows[-1].draw}")
            rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            is_truncated = not line.endswith(b"\n") and len(line) < LONGEST_ROW
            if not is_truncated:
                left_out = f"line {line_number} is not a row ({error}): it and what follows it are left out"
                log.warning("%s: %s", printable(str(path)), left_out)
                size = file.seek(0, os.SEEK_END)
            break
    return JournalContents(header, rows, size, left_out)


def _row(line: bytes, taken: set[str], ranks: int) -> LoggedRow:
    """Read a line as a row, and check that it fits into the dataset.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError: the line is not such a row.
    """
    if len(line) == LONGEST_ROW:
        raise ValueError(f"it has {LONGEST_ROW:,} bytes or more")
    fields = parse_json(line.decode())
    row = LoggedRow(fields["draw"], fields["row"], fields["per_rank"])
    for name in (*row.row, *row.per_rank):
        problem = name_problem(name, taken)
        if problem:
            raise ValueError(problem)
    values = [row.draw, *row.row.values()]
    for by_rank in row.per_rank.values():
        if not 1 <= len(by_rank) <= ranks:
            raise ValueError(f"it has {len(by_rank)} values, and there are {ranks} ranks")
        values += by_rank
    for value in values:
        if type(value) not in (int, float):
            raise ValueError(f"it has {short(value)}, which is not a number")
        # An OverflowError for an integer that no column can hold.
        float(value)
    if type(row.draw) is not int or not 0 <= row.draw <= INT64_MAX:
        raise ValueError(f"its draw is {short(row.draw)}")
    return row


def taken_names(ranks: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the dataset's dimensions and coordinates, which no variable can have."""
    return {"draw", "rank", *(name for rank in ranks for name in rank)}


def name_problem(name: object, taken: set[str]) -> str | None:
    """Say why a name cannot name a variable of the dataset; None if it can.

    Args:
        name: the name, which may be of any type in a damaged journal.
        taken: names that are in use (`taken_names`).
    """
    text = name if isinstance(name, str) else ""
    if not text.isprintable() or set(text) & set("/= ") or text[:1] in ("", "."):
        return f"{name!r} cannot name a variable: a name has no '/', '=', space or leading '.', as in val_loss"
    if name in taken:
        return f"{name!r} is a coordinate of the dataset and cannot name a variable: choose another name"
    return None


def _header(path: Path, line: bytes) -> Header:
    try:
        fields = parse_json(line.decode())
        version = fields["mmm_journal"]
        header = Header(fields["ranks"], fields["attrs"], fields.get("writer", {}))
        if not isinstance(header.ranks, list) or not header.ranks:
            raise ValueError("ranks are no list")
        if not all(isinstance(mapping, dict) for mapping in (header.attrs, header.writer, *header.ranks)):
            raise ValueError("attributes, the writer or a rank are no mapping")
        names = set(header.attrs).union(*header.ranks)
        if any(name_problem(name, {"draw", "rank"}) for name in names):
            raise ValueError("names that no dataset can have")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path}: its first line is not a journal's header ({line[:60]!r}), so its rows cannot be named. "
            "Restore the first line, or move the file away to read what else is in the folder."
        ) from error
    if version != VERSION:
        raise RecordError(f"{path} is a journal of version {version}; this mmm reads version {VERSION}.")
    return header
