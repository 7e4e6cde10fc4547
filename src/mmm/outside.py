"""Reads what others wrote: files and their locks, JSON, names in it, and text for a terminal. Imports no torch.

A file that another made may be a FIFO that nobody writes to, a device that never ends, or a million brackets: it is
refused in a line.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import re
import reprlib
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from mmm.errors import ConfigError, UserError

# Bytes of a file of JSON.
LARGEST = 1 << 26
# A heap of texts in an HDF5 file begins with this.
HEAP = b"GCOL\x01"
# Bytes of a file's name, on most file systems.
LONGEST_NAME = 255
# Characters of a value in a message.
LONGEST_SHOWN = 60
# What JSON calls these types.
KINDS = {dict: "object", list: "list", object: "value"}

# Somewhat more than is shown: a value may be huge, and `repr` must not write all of it.
_REPR = reprlib.Repr()
_REPR.maxstring = 2 * LONGEST_SHOWN
_REPR.maxlong = 2 * LONGEST_SHOWN
_REPR.maxother = 2 * LONGEST_SHOWN
_REPR.maxdict = 20
_REPR.maxlist = 20
_REPR.maxtuple = 20


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file to read. A FIFO is not waited for, and a device not read. Raises OSError."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    # Asked of the open file: the path may lead elsewhere by now.
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def check_heaps(content: bytes) -> None:
    """Raises ValueError for an HDF5 file that the HDF5 library would read without an end.

    A heap holds texts one after another, each with its size. The library goes from one to the next by that size, so an
    entry of free space whose size is 0 leads it to the same place forever.

    Source: HDF5 file format, section III.E.
    """
    begin = content.find(HEAP)
    while begin >= 0:
        size_of_heap = int.from_bytes(content[begin + 8 : begin + 16], "little")
        end = min(begin + size_of_heap, len(content))
        entry = begin + 16
        while entry + 16 <= end:
            head = content[entry : entry + 16]
            # The index of free space is 0.
            index, size = struct.unpack("<H6xQ", head)
            if index == 0 and size == 0:
                raise ValueError(f"the heap at byte {begin} has an entry without a size")
            # The size of free space includes its head, that of a text does not.
            if index > 0:
                entry += 16
            # Entries begin at multiples of 8 bytes.
            entry += (size + 7) // 8 * 8
        begin = content.find(HEAP, begin + 1)


def read_file(path: Path | str, most: int = LARGEST) -> bytes:
    """The bytes of a regular file. Raises OSError if it cannot be read, or has more than `most` bytes."""
    with open_file(path) as file:
        # One byte more tells whether the file is too large.
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
        descriptor: the open file.
        shared: take a lock that others may share; it is not free while somebody has an exclusive one.
    """
    try:
        # Windows has no such module.
        import fcntl

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except (ImportError, OSError):
        # ENOLCK, ENOSYS, EOPNOTSUPP, …: some file systems have no locks.
        return Lock.NONE
    return Lock.LOCKED


def parse_json(
    content: bytes | str,
    kind: type = dict,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a JSON text.

    Args:
        content: the text.
        kind: type of the value: dict, list, or object for any type.
        pairs: as ``object_pairs_hook`` of `json.loads`; without it the last of two equal names counts.

    Raises:
        ValueError: it is not JSON, of another kind, or nested too deep; the message says which.
    """
    try:
        value = json.loads(content, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"it is not a JSON {KINDS[kind]}")
    return value


def read_json(path: Path, error: type[UserError], kind: type = dict, name: object = None) -> Any:
    """The value of a JSON file.

    Args:
        path: the file.
        error: class of the error to raise.
        kind: as in `parse_json`.
        name: name of the file in messages. None: the path.

    Raises:
        UserError: an `error`: the file is missing, not a regular file, or not what `parse_json` takes.
    """
    try:
        return parse_json(read_file(path), kind)
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError as problem:
        reason = str(problem)
    raise error(f"{name or path} cannot be read: {reason}")


def is_plain_name(name: object) -> bool:
    """Whether a name that stands in a file may name another file next to it: it leads to no other folder, and is
    printable."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(name.encode()) <= LONGEST_NAME
    )


def expanded(path: str) -> Path:
    """A path that somebody has given, with the home in place of ~, and the values of variables in place of their names.

    Raises:
        ConfigError: a variable is not set, or empty; there is no such user.
    """

    def value(name: re.Match[str]) -> str:
        text = os.environ.get(name[1] or name[2])
        if not text:
            raise ConfigError(f"{path}: the variable {name[0]} is not set; set it, or write out what it stands for")
        return text

    full = os.path.expanduser(re.sub(r"\$([A-Za-z_]\w*)|\$\{(\w+)\}", value, path))
    if full.startswith("~"):
        raise ConfigError(f"{path}: there is no such user; a folder of that name is ./{path}")
    return Path(full)


def short(value: object) -> str:
    """A value as a message shows it: the first 60 characters of its `repr`."""
    text = _REPR.repr(value)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[: LONGEST_SHOWN - 3]}..."


def printable(text: str) -> str:
    """A text with escapes for what moves a terminal's cursor, changes its colours or its title, or is no character."""
    if text.isprintable():
        return text
    chars = []
    for char in text:
        if not char.isprintable():
            char = char.encode("unicode_escape").decode()
        chars.append(char)
    return "".join(chars)


def printable_lines(text: object) -> str:
    """`printable` for each line of a text. Tabs stay."""
    lines = []
    for line in str(text).split("\n"):
        cells = map(printable, line.split("\t"))
        lines.append("\t".join(cells))
    return "\n".join(lines)
