"""The journal: an append-only file of rows beside the dataset, so that a killed run keeps what it measured.

Its first line is a header (version, ranks, attributes), and every further line is one row with its draw index. A line
is complete or it is not a JSON object, so a reader can tell a line that a kill cut short.

Rows reach the operating system at each append: they outlive the process, however it ends, but not a power cut.
"""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from mmm.errors import RecordError
from mmm.history.record import cannot_write, reason, write_atomically

VERSION = 1
log = logging.getLogger("mmm")


class Row(NamedTuple):
    """One logged row: plain numbers by name, and lists of numbers (one a rank) by name."""

    draw: int
    row: dict[str, float | int]
    per_rank: dict[str, list[float | int]]


class Header(NamedTuple):
    ranks: list[dict[str, Any]]
    attrs: dict[str, Any]


class Journal:
    """The writing side. Holds an advisory lock on the file for as long as it is open."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        line = json.dumps({"mmm_journal": VERSION, "ranks": header.ranks, "attrs": header.attrs})
        write_atomically(path, line.encode() + b"\n")  # a journal always has a whole header
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise cannot_write(path, error) from error
        lock(self._fd)

    def append(self, rows: list[Row]) -> None:
        """Write `rows`, all or none of them. RecordError names the path, the reason and the free bytes."""
        text = "".join(json.dumps({"draw": r.draw, "row": r.row, "per_rank": r.per_rank}) + "\n" for r in rows)
        left = memoryview(text.encode())
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            self._size += len(text)  # json.dumps escapes all but ASCII: a character is a byte
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half line for the next append to run into
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


def lock(fd: int) -> bool:
    """Take the file's advisory lock. False when another process has it; True too where locks do not exist."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass  # no locks on this system or this file system: they only guard against folding a run that still writes
    return True


def read_journal(path: Path) -> tuple[Header, list[Row]] | None:
    """The header and every whole row of the journal at `path`, in order; None if there is no such file.

    A last line that was cut short is left out. A broken line before it is left out with a warning.

    Raises:
        RecordError: the file cannot be read, or its first line is not a journal's header.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {reason(error)}.") from error
    header = _header(path, lines[0])
    last = len(lines) - 1
    rows = []
    for number, line in enumerate(lines[1:], start=1):
        if not line:
            continue
        try:
            kept = json.loads(line)
            rows.append(Row(kept["draw"], kept["row"], kept["per_rank"]))
        except (ValueError, KeyError, TypeError):
            if number != last:
                log.warning("%s: line %d is not a row (%d bytes) and is left out", path, number + 1, len(line))
    return header, rows


def _header(path: Path, line: bytes) -> Header:
    try:
        found = json.loads(line)
        version, header = found["mmm_journal"], Header(found["ranks"], found["attrs"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path}: its first line is not a journal's header ({line[:60]!r}), so its rows cannot be named. "
            "Restore the first line, or move the file away to read what else is in the folder."
        ) from error
    if version != VERSION:
        raise RecordError(f"{path} is a journal of version {version}; this mmm reads version {VERSION}.")
    return header
