"""Copies what ranks print to launch's own stdout and stderr, where launch has to know that something was printed."""

import contextlib
import errno
import os
import select
import selectors
import time

from mmm_launch.channel.failures import say

CHUNK = 1 << 16
# Bytes of the end of what was printed that are kept.
TAIL = 1 << 18
# Seconds to copy what is left once the ranks have ended.
DRAIN = 1.0


class Output:
    """Two pipes from the ranks, for stdout and stderr.

    Attributes:
        duplicates: read end of each pipe → file descriptor of launch that its data is copied to.
        last: when something last came out of a pipe, by `time.monotonic()`.
        tail: the end of what was printed.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        # The write ends are for the process that is started.
        out, self.stdout = os.pipe()
        err, self.stderr = os.pipe()
        self.duplicates = {out: 1, err: 2}
        self.last = time.monotonic()
        self.tail = b""
        for fd in self.duplicates:
            selector.register(fd, selectors.EVENT_READ)

    def started(self) -> None:
        """Close launch's write ends: the process that was started has its own, and the pipes end when it does."""
        os.close(self.stdout)
        os.close(self.stderr)
        self.last = time.monotonic()

    def copy(self, ready: set[int]) -> None:
        """Copy what has arrived. What cannot be written, such as after `… | head` has ended, is lost."""
        for fd in [fd for fd in self.duplicates if fd in ready]:
            data = os.read(fd, CHUNK)
            # The end of the pipe: every process that could write to it has ended.
            if not data:
                self.selector.unregister(fd)
                os.close(fd)
                del self.duplicates[fd]
                continue
            self.last = time.monotonic()
            write(self.duplicates[fd], data)
            self.tail = (self.tail + data)[-TAIL:]

    def drain(self) -> None:
        """Copy what is left, until the pipes end or `DRAIN` seconds are over."""
        # A process that a rank has left behind may hold a pipe open for good.
        until = time.monotonic() + DRAIN
        left = DRAIN
        while self.duplicates and left > 0:
            ready, _, _ = select.select(list(self.duplicates), [], [], left)
            self.copy(set(ready))
            left = until - time.monotonic()

    def close(self) -> None:
        for fd in self.duplicates:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.duplicates = {}


def write(fd: int, data: bytes) -> None:
    """Write all of `data`. After an error everything that is written to `fd` is lost."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as error:
        # The run continues: what it prints goes to /dev/null from here on.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
        if error.errno != errno.EPIPE:
            say(f"launch: what is printed cannot be written from here on: {error.strerror}")
