"""What others wrote: files and their locks, JSON, names in them, and their text on a terminal. Imports no torch.

A file that another made may be a FIFO that nobody writes to, a device that never ends, a million brackets or a number
of a million digits. What these functions read costs a second and some hundred MB at most, or is refused in a line.
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
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from mmm.errors import UserError

LARGEST = 1 << 26  # bytes of a file of JSON
MOST_VALUES = 5_000_000  # in it: each takes up to 100 bytes of memory
DEEPEST = 100  # lists and objects inside each other
LONGEST_NUMBER = 300  # digits of an integer: what has no more fits into a float
LONGEST_NAME = 255  # bytes; of most file systems
LONGEST_SHOWN = 60  # characters of a value
HEAP = b"GCOL\x01"  # of texts, in a file of HDF5 (its format specification, III.E)
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
    """Raises ValueError where HDF5 would read without an end: in a heap of texts, at free space without a size."""
    begin = content.find(HEAP)
    while begin >= 0:
        entry, end = begin + 16, min(begin + int.from_bytes(content[begin + 8 : begin + 16], "little"), len(content))
        while entry + 16 <= end:
            number, size = struct.unpack("<H6xQ", content[entry : entry + 16])
            if number == size == 0:
                raise ValueError(f"the heap at byte {begin} has an entry without a size")
            entry += 16 * (number > 0) - size // -8 * 8
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
        ValueError: it is no JSON, of another kind, too deep, or too much; says which.
    """
    bracket, brace, comma = ("[", "{", ",") if isinstance(content, str) else (b"[", b"{", b",")
    opened = content.count(bracket) + content.count(brace)  # type: ignore[arg-type]
    if opened + content.count(comma) > MOST_VALUES:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    try:
        if isinstance(content, bytes):
            content = content.decode(json.detect_encoding(content), "surrogatepass")
        value = _decoder(pairs).decode(content)
    except RecursionError:
        raise ValueError(f"its lists and objects are more than {DEEPEST} deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if opened > DEEPEST and _deeper(value):
        raise ValueError(f"its lists and objects are more than {DEEPEST} deep")
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


@cache
def _decoder(pairs: Callable[[list[tuple[str, Any]]], Any] | None) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=pairs, parse_int=_integer)


def _integer(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"it has a number of {len(text):,} digits")
    return int(text)


def _deeper(value: Any) -> bool:
    """Whether more than `DEEPEST` lists and objects are inside each other."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return bool(level)


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
