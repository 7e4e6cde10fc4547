"""Reads files that somebody else may have written, and makes their text safe for a terminal.

A file of another user may be a FIFO that nobody writes to, or a device without an end. These functions refuse such a
file, and never wait for it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from mmm_launch.errors import UserError

# The largest file of JSON that is read, in bytes.
LARGEST = 1 << 24
# The most characters of a value in a message.
LONGEST_SHOWN = 60
# Bits of a file's mode: its group, or everybody else, may write to it.
OTHERS_WRITE = 0o022


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


def read_file(path: Path | str, most: int = LARGEST) -> bytes:
    """Read a regular file. A FIFO is not waited for, and a device is not read.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `most` bytes.
    """
    # Without O_NONBLOCK opening a FIFO waits until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(22, "it is not a regular file", str(path))
        # One byte more than allowed: the size in fstat may be wrong, as in /proc, or the file may grow.
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(27, f"it has more than {most:,} bytes", str(path))
    return content


def parse_json(content: bytes | str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError that says what is wrong with the text."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_json(path: Path, error: type[UserError], name: object = None) -> dict[str, Any]:
    """Read a file with one JSON object.

    Args:
        error: class of the error to raise.
        name: the file's name in messages. Default: its path.

    Raises:
        UserError: of the class `error`, where the file is not there, is not a regular file, or is not a JSON object.
    """
    try:
        return parse_json(read_file(path))
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError as problem:
        reason = str(problem)
    raise error(f"{name or path} cannot be read: {reason}")


def short(value: object) -> str:
    """Return a value as messages show it: its `repr`, cut to 60 characters."""
    text = repr(value)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[: LONGEST_SHOWN - 3]}..."


def printable_lines(text: object) -> str:
    """Replace the characters that move a terminal's cursor or change its colours by escapes. Tabs and lines stay."""
    return "".join(_printable(character) for character in str(text))


def _printable(character: str) -> str:
    if character.isprintable() or character in "\t\n":
        return character
    return character.encode("unicode_escape").decode()
