"""Ties a process's life to its parent's, by Linux's parent-death signal. Elsewhere every function here does nothing.

The kernel sends the signal when the *thread* that forked the process ends, so only forks from a main thread are tied.
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1

_forking: tuple[int, bool] = (0, False)  # the process about to fork, and whether its main thread does


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, is gone; at once if it already is."""
    if not sys.platform.startswith("linux"):
        return
    _prctl(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    if sys.platform.startswith("linux"):
        _prctl(0)


def tie_forks() -> None:
    """From now on, processes that this one forks from its main thread die with it, and so do theirs."""
    os.register_at_fork(before=_note_fork, after_in_child=_tie_child)


def _note_fork() -> None:
    global _forking
    _forking = os.getpid(), threading.current_thread() is threading.main_thread()


def _tie_child() -> None:
    parent, from_main = _forking
    if from_main:
        die_with_parent(parent)


def _prctl(value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(value), 0, 0, 0)
