"""Forked processes that always end: none outlives its parent, hangs it, or leaves processes behind."""

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

# Seconds to wait for a killed process. One in an uninterruptible system call is left to the system.
REAP = 10.0
# Seconds for a process that has closed its pipe to end by itself.
LEAVE = 0.2
# Seconds for a process that hangs to say where.
TELL = 2.0
# Bytes of frames that are read.
MAX_FRAMES = 1 << 20
BLOCKED = {signal.SIGINT}


class Child:
    """A forked process, which leads a process group of its own (in the system's sense).

    Attributes:
        pid: its process id.
        end: this process's end of the pipe between them.
        stack: a file in which it leaves its threads' frames, if a signal such as SIGSEGV ends it or SIGQUIT asks for
            them.
        code: its exit code, negative for a signal; None until it is known to have ended.
    """

    def __init__(self, pid: int, end: Connection, stack: IO[bytes]) -> None:
        self.pid = pid
        self.end = end
        self.stack = stack
        self.code: int | None = None

    def last_frames(self) -> str:
        """Where its threads were when a fatal signal ended it; empty if none did."""
        # Both processes share the file's position, at which the child may be writing: pread does not move it.
        return os.pread(self.stack.fileno(), MAX_FRAMES, 0).decode(errors="replace")

    def frames(self) -> str:
        """Where its threads are now, in Python code; empty if it does not answer."""
        os.kill(self.pid, signal.SIGQUIT)
        deadline = time.monotonic() + TELL
        frames = ""
        # It is still writing as long as there is more each time.
        while time.monotonic() < deadline and not (frames and frames == self.last_frames()):
            frames = self.last_frames()
            time.sleep(0.05)
        return frames

    def receive(self, timeout: float) -> Any:
        """Return what it sends next.

        Raises:
            TimeoutError: nothing came in `timeout` seconds.
            EOFError, OSError: it has ended.
        """
        if not self.end.poll(timeout):
            raise TimeoutError(f"no answer in {timeout:g} s")
        return self.end.recv()

    def kill(self) -> None:
        """Kill it and its process group. Its id cannot belong to another process yet: only `stop` reaps it."""
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
                # Processes that it left behind keep the group's id taken, so this cannot hit another group.
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
                break
            if time.monotonic() >= began + grace:
                self.kill()
            time.sleep(0.002)
        return self.code


class Children(contextlib.AbstractContextManager):
    """The processes forked here. They end with the ``with`` block; on Linux also when this process ends in any way."""

    # Whether others have frozen objects. It is not asked again once they have: a million take 30 ms to count.
    frozen = False

    def __init__(self) -> None:
        self.all: list[Child] = []

    def fork(self, main: Callable[[Connection], object]) -> Child:
        """Fork a process that calls `main` with its end of a pipe, and exits. Torch has one thread there.

        The terminal's Ctrl-C reaches only this process, not the child.
        """
        flush()
        ours, theirs = Pipe()
        # Open as long as the child lives.
        stack = tempfile.TemporaryFile()  # noqa: SIM115
        # The kernel ends the child with the thread that forked it: only the main thread lives as long as the process.
        parent = None
        if threading.current_thread() is threading.main_thread():
            parent = os.getpid()
        # A KeyboardInterrupt right after the fork could make the child continue as a second parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        Children.frozen = Children.frozen or gc.get_freeze_count() > 0
        # The child's collector would write to all objects that it shares with this process, and so copy their memory.
        gc.freeze()
        try:
            pid = os.fork()
            if pid == 0:
                for end in (ours, *(child.end for child in self.all)):
                    end.close()
                _live(parent, mask, main, theirs, stack)
            child = Child(pid, ours, stack)
            self.all.append(child)
        finally:
            # What somebody else had frozen stays frozen.
            if not self.frozen:
                gc.unfreeze()
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return child

    def end(self) -> None:
        """Kill all that are left, with the processes that they have started."""
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
    """The child's life.

    Args:
        parent: the process to die with; None if that is not possible.
        mask: the signals that were blocked before the fork.
        main: what to call.
        end: this process's end of the pipe.
        stack: the file for its threads' frames.
    """
    code = 1
    try:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGQUIT, stack)
        os.setpgid(0, 0)
        if parent is not None:
            forks.die_with_parent(parent)
        forks.tie_forks()
        # More threads would be the parent's OpenMP threads, which a fork does not have and would wait for.
        forks.use_one_thread()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        main(end)
        code = 0
    finally:
        # Past the interpreter's own end: taking torch down takes 0.4 s.
        os._exit(code)


def flush() -> None:
    """Write what this process has printed so far, unless the user's code has closed the streams."""
    for stream in (sys.stdout, sys.stderr):
        # "I/O operation on closed file."
        with contextlib.suppress(ValueError):
            stream.flush()


def ended(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None:
        return "cannot be killed"
    if code >= 0:
        return f"exited with code {code} and said nothing"
    try:
        return f"killed by {signal.Signals(-code).name}"
    # A real-time signal has no name.
    except ValueError:
        return f"killed by signal {-code}"
