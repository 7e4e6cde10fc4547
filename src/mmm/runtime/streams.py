"""Makes standard output and error streams that never end a program. Standard library only.

What a program prints is for people. Its reader may have gone (`… | head`), its disk may be full, or a file's name may
contain bytes that are not text in this locale. The program continues, and its files have everything.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}


class _Lossy(io.FileIO):
    """A file descriptor that accepts everything. After the first error, what is written to it is lost."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            lose(self.fileno(), error)
            return len(data)


def lose(fd: int, error: OSError) -> None:
    """Make `fd` /dev/null from now on, for all that write to it. Says why on stderr, unless its reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
    if fd != STREAMS["stderr"] and error.errno != errno.EPIPE:
        message = f"what is printed cannot be written from here on: {error.strerror}\n"
        with contextlib.suppress(OSError):
            os.write(STREAMS["stderr"], message.encode())


def take_any_text() -> None:
    """Print characters that the locale cannot show, and bytes of names that are not text, as escapes."""
    for name in STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def never_fail() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that raise no error, if they are this process's own."""
    take_any_text()
    for name, fd in STREAMS.items():
        stream = getattr(sys, name)
        # A text stream has a buffer, and that a raw file; with `python -u` the buffer is the raw file itself.
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        # A test runner or a notebook has put its own stream here: it stays.
        if type(raw) is not io.FileIO or raw.fileno() != fd:
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        lossy = _Lossy(fd, "wb", closefd=False)
        lossy.name = raw.name
        made = io.TextIOWrapper(
            io.BufferedWriter(lossy),
            stream.encoding,
            stream.errors,
            newline="\n" if os.linesep == "\n" else None,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        made.mode = "w"  # type: ignore[misc]
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
