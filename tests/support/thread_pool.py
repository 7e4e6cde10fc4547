"""PyTorch's thread pool, which a fork loses, asked for by many threads at once."""

import ctypes
import threading

import torch

# Processes that are started to make the pool anew: as long as that takes, another thread finds none.
THREADS = 64
ASKING = 8


def ask_at_once():
    """As the threads of autograd do at the first backward pass; with two at it to make the pool, the process aborts."""
    ask = ctypes.CDLL(torch._C.__file__)._ZN2at16init_num_threadsEv
    gate = threading.Barrier(ASKING)

    def begin():
        gate.wait()
        ask()

    threads = [threading.Thread(target=begin) for _ in range(ASKING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make():
    """Make the pool; and let PyTorch know this thread, or it makes the pool anew in forks by itself."""
    torch.set_num_threads(THREADS)
    torch.get_num_threads()
