"""Standard output and error that never end a program. Standard library only.

What a program prints is for people: its reader may have gone (`… | head`), its disk may be full, a file's name may have
bytes that are no text in this locale. The work goes on, and its files have all of it.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}


class _Lossy(io.FileIO):
    """A file descriptor that takes everything: from the first error on, what is written to it is lost."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            lose(self.fileno(), error)
            return len(data)


def lose(fd: int, error: OSError) -> None:
    """From here on `fd` is /dev/null, for all that write to it. Says why on stderr, unless its reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
    if fd != STREAMS["stderr"] and error.errno != errno.EPIPE:
        with contextlib.suppress(OSError):
            os.write(STREAMS["stderr"], f"what is printed cannot be written from here on: {error.strerror}\n".encode())


def take_any_text() -> None:
    """Have characters that the locale cannot show, and the bytes of names that are no text, printed as escapes."""
    for name in STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def never_fail() -> None:
    """Replace `sys.stdout` and `sys.stderr` by such as raise no error, where they are this process's own."""
    take_any_text()
    for name, fd in STREAMS.items():
        stream = getattr(sys, name)
        raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
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
