"""The store by which the ranks of a job find each other, and the clear error of a rank that finds nobody."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from mmm.contract import ENDING, MARKER_VARIABLE
from mmm.errors import LaunchError
from mmm.runtime.ranks import Rank

CHUNK = 256  # ranks that are waited for at once

# The store of this process's last meeting, by where it is and who meets there. It stays for the next: closed and opened
# again, a rank that is early would find the old one, which closes under it.
_last: dict[tuple, dist.Store] = {}


@contextlib.contextmanager
def meeting(rank: Rank, limit: timedelta) -> Iterator[dist.Store]:
    """The store that all ranks share, while they meet.

    Until they have met, a signal would make PyTorch print C++ frames and go on. launch kills who does not heed it.

    Args:
        limit: how long a rank waits for the others.

    Raises:
        LaunchError: rank 0 cannot listen on MASTER_PORT, or another rank cannot reach it.
    """
    meets = rank.source != "alone" and MARKER_VARIABLE in os.environ
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if meets else ())
    try:
        yield rank.store or _find_store(rank, limit)
    except dist.DistNetworkError as error:
        if rank.is_main and "EADDRINUSE" in str(error):
            raise LaunchError(
                f"MASTER_PORT {rank.port} is already in use on {rank.address}: choose another port "
                f"(MASTER_PORT=…), or unset it and let `launch` find a free one"
            ) from None
        raise LaunchError(
            f"rank {rank.rank} cannot reach rank 0 at {rank.address}:{rank.port} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _find_store(rank: Rank, limit: timedelta) -> dist.Store:
    if rank.source == "alone":
        return dist.HashStore()
    _close_in_time()
    where = (rank.address, rank.port, rank.rank, rank.world_size)
    if where not in _last:
        _last.clear()
        url = f"tcp://{rank.address}:{rank.port}"
        _last[where], *_ = next(dist.rendezvous(url, rank.rank, rank.world_size, timeout=limit))
    store = _last[where]
    store.set_timeout(limit)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return dist.PrefixStore(f"mmm/meeting/{find_meeting(store, rank)}", store)
    return store


def find_meeting(store: dist.Store, rank: Rank) -> int:
    """The number of the meeting that all ranks are at now, from 1 on. A collective.

    torchrun's store stays when it starts the ranks again, with all that the dead have left in it: how far each had
    come, and where it listened. Rank 0 begins a meeting that is new; the others come once it has begun. One at which
    not all have come is over when the next begins; one that has been held is not waited for again.
    """

    def key(number: int, what: str) -> str:
        return f"mmm/meetings/{number}/{what}"

    if rank.is_main:
        number = store.add("mmm/meetings", 1)
        if number > 1 and not store.check([key(number - 1, "end")]):
            store.set(key(number - 1, "end"), "over")
        store.set(key(number, "begin"), "")
        came = [key(number, str(other)) for other in range(1, rank.world_size)]
        for start in range(0, len(came), CHUNK):
            store.wait(came[start : start + CHUNK])
        store.set(key(number, "end"), "held")
        return number
    number = store.add("mmm/meetings", 0)
    if number == 0 or store.check([key(number, "end")]):
        number += 1
    while True:
        store.get(key(number, "begin"))
        store.set(key(number, str(rank.rank)), "")
        if store.get(key(number, "end")) == b"held":
            return number
        number += 1


@functools.cache
def _close_in_time() -> None:
    os.register_at_fork(before=_close_if_unused)
    atexit.register(_last.clear)


def _close_if_unused() -> None:
    """A fork has none of its threads, and would wait for them at its end."""
    if not dist.is_initialized():
        _last.clear()
