"""Helps forked processes: they die with their parent, and get threads of their own."""

import ctypes
import os
import signal
import sys
import threading

# The number of this request to prctl(), from <linux/prctl.h>.
PR_SET_PDEATHSIG = 1

# The process that is about to fork, and whether its main thread does it.
_forking: tuple[int, bool] = (0, False)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process as soon as process `parent`, which started it, is gone."""
    if not sys.platform.startswith("linux"):
        return
    _prctl(signal.SIGKILL)
    # The parent died before the request was made: no signal would come any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    if sys.platform.startswith("linux"):
        _prctl(0)


def tie_forks() -> None:
    """From now on, processes that this one forks from its main thread die with it, and so do their forks."""
    # The kernel watches the thread that forked, not the process. A thread may end long before its process, which
    # would kill the fork: only forks of the main thread are tied.
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


def renew_thread_pools(count: int | None = None) -> None:
    """Make PyTorch's thread pools anew in a forked process. Call it before the process starts a thread.

    A fork has none of its parent's threads. PyTorch notes that the pool of `caffe2::pthreadpool()` is lost, and the
    first thread that asks for it makes a new one, without a lock: another thread that asks meanwhile gets no pool, and
    the process aborts ("Invalid thread pool!"). autograd's threads all ask at once, at the first backward pass: one for
    each device, and a build for CUDA has eight of them even on a host without a device, after a FakeTensorMode was used
    (DTensor uses one). PyTorch's own handler for forks asks first, but only if the parent's main thread has never asked
    for the number of threads. Setting the number of threads asks for the pool here, where nobody else does.

    Args:
        count: number of threads from now on. None: as many as in the parent.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if count is None:
        count = torch.get_num_threads()
    torch.set_num_threads(count)
