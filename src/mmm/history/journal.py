"""The journal: an append-only file of rows beside the dataset, so that a killed run keeps what it measured.

The first line is a header (version, ranks, attributes, writing process), every further line one row with its draw
index. A line that a kill has truncated is not a JSON object, so a reader recognises it.

Rows reach the operating system at each append: they survive the process, but not a power failure.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mmm.errors import RecordError
from mmm.history.alive import Lock, lock, this_process
from mmm.history.record import cannot_write, reason, write_atomically

VERSION = 1
log = logging.getLogger("mmm")


class LoggedRow(NamedTuple):
    """One logged row: scalars by name, and lists of one value a rank by name."""

    draw: int
    row: dict[str, float | int]
    per_rank: dict[str, list[float | int]]


class Header(NamedTuple):
    """`writer`: of `mmm.history.alive.this_process`; empty in older journals."""

    ranks: list[dict[str, Any]]
    attrs: dict[str, Any]
    writer: Mapping[str, Any] = MappingProxyType({})


class Kept(NamedTuple):
    """The content of a journal, of which `size` bytes have been read."""

    header: Header
    rows: list[LoggedRow]
    size: int


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
        self._fd, self._size = fd, len(content)
        self._lock = lock(fd)

    def append(self, rows: list[LoggedRow]) -> None:
        """Write `rows`, all or none of them. RecordError names the path, the reason and the free bytes."""
        self.ensure()
        text = "".join(json.dumps({"draw": r.draw, "row": r.row, "per_rank": r.per_rank}) + "\n" for r in rows)
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
        there = read_journal(self.path)
        if there is not None and there.header.writer != self._writer:
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
            there = os.stat(self.path)
        except OSError:  # removed, or a stale NFS handle
            return False
        return opened.st_nlink > 0 and (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino)

    def _read_back(self) -> bytes:
        """All that was written, from the removed file while it is open; the header where that fails."""
        try:
            content = os.pread(self._fd, self._size, 0)
        except OSError:
            return self._first
        return content if len(content) == self._size else self._first

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


def read_journal(path: Path) -> Kept | None:
    """The header and every complete row of the journal at `path`, in order; None if there is no such file.

    A truncated last line is left out. A broken line before it is left out with a warning.

    Raises:
        RecordError: the file cannot be read, or its first line is not a journal's header.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {reason(error)}.") from error
    lines = content.split(b"\n")
    header = _header(path, lines[0])
    last = len(lines) - 1
    rows = []
    for number, line in enumerate(lines[1:], start=1):
        if not line:
            continue
        try:
            kept = json.loads(line)
            rows.append(LoggedRow(kept["draw"], kept["row"], kept["per_rank"]))
        except (ValueError, KeyError, TypeError):
            if number != last:
                log.warning("%s: line %d is not a row (%d bytes) and is left out", path, number + 1, len(line))
    return Kept(header, rows, len(content))


def _header(path: Path, line: bytes) -> Header:
    try:
        found = json.loads(line)
        version, header = found["mmm_journal"], Header(found["ranks"], found["attrs"], found.get("writer", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path}: its first line is not a journal's header ({line[:60]!r}), so its rows cannot be named. "
            "Restore the first line, or move the file away to read what else is in the folder."
        ) from error
    if version != VERSION:
        raise RecordError(f"{path} is a journal of version {version}; this mmm reads version {VERSION}.")
    return header
