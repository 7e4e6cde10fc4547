"""What a process that is forked needs: an end when its parent ends, and threads of its own."""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1

# The process that is about to fork, and whether its main thread does it.
_forking: tuple[int, bool] = (0, False)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, is gone; at once if it already is."""
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


def renew_thread_pools(count: int | None = None) -> None:
    """Call it in a forked process before that starts a thread.

    A fork has none of its parent's threads. PyTorch notes that the pool of `caffe2::pthreadpool()` is lost, and lets
    the first thread that asks for it make it anew, without a lock: another that asks meanwhile gets none, and the
    process aborts ("Invalid thread pool!"). The threads that autograd starts at the first backward pass, one a device,
    all ask at once; a build for CUDA has eight on a host without a device too, once there was a FakeTensorMode, as for
    the rules of DTensor. PyTorch's own handler of forks asks first, but only where the parent's main thread had not
    asked how many threads there are. Setting their number asks for the pool here, where nobody else does.

    Args:
        count: threads from now on; None: as many as in the parent.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads() if count is None else count)
