"""Forked processes that all end: none outlives its parent, hangs it, or leaves behind what it has started itself."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

from mmm_verify.ranks import forks

REAP = 10.0  # s to wait for a killed process; one in an uninterruptible call is left to the system
LEAVE = 0.2  # s for a process that has closed its pipe to end by itself
MOST = 1 << 20  # bytes of frames that are read
TELL = 2.0  # s for a process that hangs to say where
BLOCKED = {signal.SIGINT}


class Child:
    """A forked process, which leads a process group.

    Attributes:
        end: this process's end of the pipe between them. stack: a file that it leaves its threads' frames in, if a
            signal such as SIGSEGV ends it, or SIGQUIT asks for them.
    """

    def __init__(self, pid: int, end: Connection, stack: IO[bytes]) -> None:
        self.pid, self.end, self.stack = pid, end, stack
        self.code: int | None = None

    def last_frames(self) -> str:
        """Where its threads were when a fatal signal ended it; empty if none did."""
        # The child may be writing, at the offset that both share: `pread` leaves it.
        return os.pread(self.stack.fileno(), MOST, 0).decode(errors="replace")

    def frames(self) -> str:
        """Where its threads are now, as far as they are in Python; empty if it does not answer."""
        os.kill(self.pid, signal.SIGQUIT)
        deadline = time.monotonic() + TELL
        said = ""
        while time.monotonic() < deadline and not (said and said == self.last_frames()):  # it may still be writing
            said = self.last_frames()
            time.sleep(0.05)
        return said

    def receive(self, timeout: float) -> Any:
        """What it sends next.

        Raises:
            TimeoutError: nothing came in `timeout` seconds. EOFError, OSError: it has ended.
        """
        if not self.end.poll(timeout):
            raise TimeoutError(f"no answer in {timeout:g} s")
        return self.end.recv()

    def kill(self) -> None:
        """Kill it and all of its group. Its number is still its own: `stop` alone reaps it."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)

    def stop(self, grace: float = 0.0) -> int | None:
        """Wait for its end, and kill it after `grace` seconds. Returns its exit code, negative for a signal."""
        began = time.monotonic()
        while self.code is None and time.monotonic() < began + grace + REAP:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)  # what it left behind keeps the group's number taken
                break
            if time.monotonic() >= began + grace:
                self.kill()
            time.sleep(0.002)
        return self.code


class Children(contextlib.AbstractContextManager):
    """The processes forked here. All end with the ``with`` block, and on Linux with this process, however it ends."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def fork(self, main: Callable[[Connection], object]) -> Child:
        """A new process, which calls `main` with its end of a pipe, and exits. Torch has one thread there.

        The terminal's Ctrl-C reaches this process alone.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = Pipe()
        stack = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the child)
        # The kernel would end the child with the thread that forked it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # or Ctrl-C could make the child a second parent
        frozen = gc.get_freeze_count()
        gc.freeze()  # or the child's collector writes to, and so copies, the memory of all that it shares with this one
        try:
            pid = os.fork()
            if pid == 0:
                for end in (ours, *(child.end for child in self.all)):
                    end.close()
                _live(parent, mask, main, theirs, stack)
            self.all.append(Child(pid, ours, stack))
        finally:
            if not frozen:
                gc.unfreeze()
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self.all[-1]

    def end(self) -> None:
        """Kill all that are left, with what they have started."""
        for child in self.all:
            if child.code is None:
                child.kill()
        for child in self.all:
            child.stop()
            child.end.close()
            child.stack.close()
        self.all.clear()

    def __exit__(self, *error: object) -> None:
        self.end()


def _live(
    parent: int | None, mask: set, main: Callable[[Connection], object], end: Connection, stack: IO[bytes]
) -> NoReturn:
    """The child's life."""
    code = 1
    try:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGQUIT, stack)
        os.setpgid(0, 0)
        if parent is not None:
            forks.die_with_parent(parent)
        forks.tie_forks()
        forks.use_one_thread()  # the parent's OpenMP threads, of which the fork has none, are waited for otherwise
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        main(end)
        code = 0
    finally:
        os._exit(code)  # not through the interpreter's end: taking torch down takes 0.4 s


def ended(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None:
        return "cannot be killed"
    if code >= 0:
        return f"exited with code {code} and said nothing"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time one has no name
        return f"killed by signal {-code}"
