"""What others wrote: files and their locks, JSON, names in them, and their text on a terminal. Imports no torch.

A file that another made may be a FIFO that nobody writes to, a device that never ends, or a million brackets: it is
refused in a line.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import reprlib
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from mmm.errors import UserError

LARGEST = 1 << 26  # bytes of a file of JSON
HEAP = b"GCOL\x01"  # the beginning of a heap of texts, in a file of HDF5
LONGEST_NAME = 255  # bytes; of most file systems
LONGEST_SHOWN = 60  # characters of a value
KINDS = {dict: "object", list: "list", object: "value"}

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 2 * LONGEST_SHOWN
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 20


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file to read. A FIFO is not waited for, and a device not read. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def check_heaps(content: bytes) -> None:
    """Raises ValueError for an HDF5 file that the HDF5 library would read without an end.

    A heap holds texts one after another, each with its size. The library goes from one to the next by that size, so an
    entry of free space whose size is 0 leads it to the same place for ever. Source: HDF5 file format, section III.E.
    """
    begin = content.find(HEAP)
    while begin >= 0:
        size_of_heap = int.from_bytes(content[begin + 8 : begin + 16], "little")
        end = min(begin + size_of_heap, len(content))
        entry = begin + 16
        while entry + 16 <= end:
            number, size = struct.unpack("<H6xQ", content[entry : entry + 16])
            if number == 0 and size == 0:
                raise ValueError(f"the heap at byte {begin} has an entry without a size")
            if number > 0:
                entry += 16  # the head of a text; that of free space is a part of its size
            entry += (size + 7) // 8 * 8
        begin = content.find(HEAP, begin + 1)


def read_file(path: Path | str, most: int = LARGEST) -> bytes:
    """A regular file's bytes. Raises OSError: it cannot be read, is no file, or has more than `most`."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


class Lock(enum.Enum):
    """The result of asking for a file's lock."""

    LOCKED = "held by us"
    TAKEN = "held by another"
    NONE = "the file system has no locks"


def lock(descriptor: int, shared: bool = False) -> Lock:
    """Take a file's advisory lock, if it is free. Closing the descriptor releases it.

    Args:
        shared: with others that ask for it so; without one that has it alone.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except (ImportError, OSError):  # ENOLCK, ENOSYS, EOPNOTSUPP, …
        return Lock.NONE
    return Lock.LOCKED


def parse_json(
    content: bytes | str, kind: type = dict, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """What JSON says.

    Args:
        kind: of the whole: dict, list or object, which is any.
        pairs: as ``object_pairs_hook`` of `json.loads`; without it the last of two equal names counts.

    Raises:
        ValueError: it is no JSON, of another kind, or too deep; says which.
    """
    try:
        value = json.loads(content, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"it is no JSON {KINDS[kind]}")
    return value


def read_json(path: Path, error: type[UserError], kind: type = dict, name: object = None) -> Any:
    """What a file of JSON says.

    Args:
        error: to raise. kind: as of `parse_json`. name: of the file in messages, if it is not the path.

    Raises:
        UserError: of the class `error`; the file is not there, or no regular one, or not what `parse_json` takes.
    """
    try:
        return parse_json(read_file(path), kind)
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError as problem:
        reason = str(problem)
    raise error(f"{name or path} cannot be read: {reason}")


def is_plain_name(name: object) -> bool:
    """Whether a name in a file may name another file beside it: no way to another folder, and printable."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(name.encode()) <= LONGEST_NAME
    )


def short(value: object) -> str:
    """What a message says of a value: its `repr`, 60 characters of it."""
    text = _REPR.repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def printable(text: str) -> str:
    """`text` with escapes for what moves a terminal's cursor, changes its colours or its title, or is no character."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: object) -> str:
    """`printable`, of each line; tabs stay."""
    lines = ("\t".join(map(printable, line.split("\t"))) for line in str(text).split("\n"))
    return "\n".join(lines)
