"""What a forked process needs: to end when its parent ends, and threads of its own."""

import ctypes
import os
import signal
import sys
import threading

# Linux's prctl option: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1

# The process that is about to fork, and whether its main thread does.
_forking: tuple[int, bool] = (0, False)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, ends; at once if it already has."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have ended before the request was made.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def tie_forks() -> None:
    """From now on, processes that this one forks from its main thread die with it, and so do the ones they fork."""
    os.register_at_fork(before=_note_fork, after_in_child=_tie_child)


def _note_fork() -> None:
    global _forking
    _forking = (os.getpid(), threading.current_thread() is threading.main_thread())


def _tie_child() -> None:
    parent, from_main = _forking
    # The kernel counts the end of the forking thread as the parent's end: a fork from another thread cannot be tied.
    if from_main:
        die_with_parent(parent)


def use_one_thread() -> None:
    """Have torch, if it is imported, compute on one thread. Call it in a forked process before that starts a thread.

    A fork has none of its parent's threads. PyTorch makes the pool of ``caffe2::pthreadpool()`` anew for the first
    thread that asks for it, without a lock: another that asks at the same time gets none, and the process aborts
    ("Invalid thread pool!"). The threads that autograd starts at the first backward all ask at once. Setting the number
    of threads asks for the pool here, where nobody else does.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
