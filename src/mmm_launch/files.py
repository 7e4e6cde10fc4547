"""Reads files that somebody else may have written, and makes their text safe for a terminal.

A file of another user may be a FIFO that nobody writes to, a device without an end, or a million brackets. These
functions refuse such a file in a line, and never wait for it.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# The largest file of JSON that is read, in bytes.
LARGEST = 1 << 26
# The most characters of a value in a message.
LONGEST_SHOWN = 60
# Bits of a file's mode: its group, or everybody else, may write to it.
OTHERS_WRITE = 0o022
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


def open_own(path: Path | str) -> int:
    """Open a folder that belongs to this user, and to which nobody else can write.

    Returns:
        A file descriptor of the folder.

    Raises:
        OSError: the folder is not there, or it is a link, a FIFO or a file.
        PermissionError: it is somebody else's, or others can write to it.
    """
    # The checks are made on the open folder: nobody can exchange it for another one in between.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid():
        reason = "it belongs to somebody else"
    elif info.st_mode & OTHERS_WRITE:
        reason = "others can write to it"
    else:
        return descriptor
    os.close(descriptor)
    raise PermissionError(1, reason, os.fspath(path))


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


def read_file(path: Path | str, most: int = LARGEST) -> bytes:
    """The bytes of a regular file. Raises OSError if it cannot be read, or has more than `most` bytes."""
    with open_file(path) as file:
        # One byte more tells whether the file is too large.
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


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


def read_json(path: Path, error: type[Exception], kind: type = dict, name: object = None) -> Any:
    """The value of a JSON file.

    Args:
        path: the file.
        error: class of the error to raise.
        kind: as in `parse_json`.
        name: name of the file in messages. None: the path.

    Raises:
        Exception: an `error`: the file is missing, not a regular file, or not what `parse_json` takes.
    """
    try:
        return parse_json(read_file(path), kind)
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError as problem:
        reason = str(problem)
    raise error(f"{name or path} cannot be read: {reason}")


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
