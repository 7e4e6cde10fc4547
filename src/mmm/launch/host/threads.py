"""The threads that torch computes with, in a process that was just forked."""

import sys


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
