"""The journal: an append-only file of rows beside the dataset, so that a killed run keeps what it measured.

The first line is a header (version, ranks, attributes, writing process), every further line one row with its draw
index. A line that a kill has truncated is not a JSON object, so a reader recognises it. A line that is no row of this
run, whatever has made it so, ends the reading, and the record says which it is and why (`LEFT_OUT`).

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
LEFT_OUT = "left_out"  # the dataset's attribute: why the reading of a journal ended before its end
INT64_MAX = 2**63 - 1
LONGEST_ROW = 1 << 24  # bytes
log = logging.getLogger("mmm")


class LoggedRow(NamedTuple):
    """One logged row: scalars by name, and lists of one value a rank by name."""

    draw: int
    row: dict[str, float | int]
    per_rank: dict[str, list[float | int]]


class Header(NamedTuple):
    """`writer`: of `this_process`; empty in older journals."""

    ranks: list[dict[str, Any]]
    attrs: dict[str, Any]
    writer: Mapping[str, Any] = MappingProxyType({})


class JournalContents(NamedTuple):
    """The content of a journal, of which `size` bytes have been read. `left_out`: why the rest is not."""

    header: Header
    rows: list[LoggedRow]
    size: int
    left_out: str = ""


def this_process() -> dict[str, Any]:
    """What a journal's header says of its writer."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


class Journal:
    """The writing side. Holds an advisory lock on the file while it is open.

    Without locks, a user may take the run for a killed one and finalize it: each write checks the file and restores it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._fd = -1
        self._lock = Lock.LOCKED
        self._start(header)
        if self._lock is Lock.NONE:  # a reader on another host may find locks: the header warns it
            self._start(header)

    def _start(self, header: Header) -> None:
        """A journal without rows."""
        self._writer = this_process() | {"locks": self._lock is not Lock.NONE}
        fields = {"mmm_journal": VERSION, "ranks": header.ranks, "attrs": header.attrs, "writer": self._writer}
        self._first = json.dumps(fields).encode() + b"\n"
        self._make(self._first)

    def _make(self, content: bytes) -> None:
        """Put a file with that content in place, and open it. The header is always complete."""
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
        """Write `rows`, all or none of them. RecordError names the path, the reason and the free bytes."""
        self.ensure()
        text = "".join(f"{json.dumps(row._asdict())}\n" for row in rows)
        left = memoryview(text.encode())
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            self._size += len(text)  # json.dumps escapes all but ASCII: a character is a byte
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no truncated line before the next append
            raise cannot_write(self.path, error) from error

    def ensure(self) -> None:
        """Restore the file, with its rows, where it has been removed.

        Raises:
            RecordError: that is not possible, or another run's journal is in its place.
        """
        if self._in_place():
            if self._lock is Lock.TAKEN:  # by a reader that checked for a writer
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
        log.warning(
            "%s was removed while the run goes on: it is made anew, with %d rows", self.path, content.count(b"\n") - 1
        )

    def _in_place(self) -> bool:
        try:
            opened = os.fstat(self._fd)
            current = os.stat(self.path)
        except OSError:  # removed, or a stale NFS handle
            return False
        return opened.st_nlink > 0 and (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)

    def _read_back(self) -> bytes:
        """All that was written, from the removed file while it is open; the header where that fails."""
        try:
            content = os.pread(self._fd, self._size, 0)
        except OSError:
            return self._first
        return content if len(content) == self._size else self._first

    def close(self) -> None:
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            with contextlib.suppress(OSError):
                os.close(fd)


def read_journal(path: Path) -> JournalContents | None:
    """The header of the journal at `path`, and its rows up to the first line that is none; None without such a file.

    A truncated last line is left out. Another line that is no row ends the reading, with a warning that says why.

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
    # One line at a time, and none of it beyond what a row may have: a damaged one may be as long as the file.
    for number, line in enumerate(iter(partial(file.readline, LONGEST_ROW), b""), start=2):
        size += len(line)
        try:
            row = _row(line, taken, len(header.ranks))
            if rows and row.draw != rows[-1].draw + 1:
                raise ValueError(f"its draw {row.draw} does not follow {rows[-1].draw}")
            rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            is_truncated = not line.endswith(b"\n") and len(line) < LONGEST_ROW
            if not is_truncated:
                left_out = f"line {number} is not a row ({error}): it and what follows it are left out"
                log.warning("%s: %s", printable(str(path)), left_out)
                size = file.seek(0, os.SEEK_END)
            break
    return JournalContents(header, rows, size, left_out)


def _row(line: bytes, taken: set[str], ranks: int) -> LoggedRow:
    """A line as a row that fits into the dataset. Raises ValueError, KeyError, TypeError, AttributeError."""
    if len(line) == LONGEST_ROW:
        raise ValueError(f"it has {LONGEST_ROW:,} bytes or more")
    fields = parse_json(line.decode())
    row = LoggedRow(fields["draw"], fields["row"], fields["per_rank"])
    for name in (*row.row, *row.per_rank):
        problem = name_problem(name, taken)
        if problem:
            raise ValueError(problem)
    numbers = [row.draw, *row.row.values()]
    for values in row.per_rank.values():
        if not 1 <= len(values) <= ranks:
            raise ValueError(f"it has {len(values)} values, and there are {ranks} ranks")
        numbers += values
    for number in numbers:
        if type(number) not in (int, float):
            raise ValueError(f"it has {short(number)}, and no number")
        float(number)  # an OverflowError for an integer that no column can hold
    if type(row.draw) is not int or not 0 <= row.draw <= INT64_MAX:
        raise ValueError(f"its draw is {short(row.draw)}")
    return row


def taken_names(ranks: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the dataset's dimensions and coordinates."""
    return {"draw", "rank", *(key for place in ranks for key in place)}


def name_problem(name: object, taken: set[str]) -> str | None:
    """Why this cannot name a variable of the dataset; None: it can."""
    if not isinstance(name, str) or not name or not name.isprintable() or set(name) & set("/= ") or name[0] == ".":
        return f"{name!r} cannot name a variable: no '/', '=', space or leading '.'; say val_loss"
    if name in taken:
        return f"{name!r} is a coordinate of the dataset and cannot name a variable. choose another"
    return None


def _header(path: Path, line: bytes) -> Header:
    try:
        fields = parse_json(line.decode())
        version = fields["mmm_journal"]
        header = Header(fields["ranks"], fields["attrs"], fields.get("writer", {}))
        if not isinstance(header.ranks, list) or not header.ranks or not isinstance(header.writer, dict):
            raise ValueError("ranks or the writer are of another type")
        if any(name_problem(name, {"draw", "rank"}) for name in set(header.attrs).union(*header.ranks)):
            raise ValueError("names that no dataset can have")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path}: its first line is not a journal's header ({line[:60]!r}), so its rows cannot be named. "
            "Restore the first line, or move the file away to read what else is in the folder."
        ) from error
    if version != VERSION:
        raise RecordError(f"{path} is a journal of version {version}; this mmm reads version {VERSION}.")
    return header
