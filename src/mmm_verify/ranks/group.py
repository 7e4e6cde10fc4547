"""The process group of forked ranks, for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from mmm_verify.ranks.ranks import Rank, environment
from mmm_verify.torch_private import all_groups, default_timeout

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}

# The store and the groups that the last `process_group` left. They stay until ranks meet again, or the process forks.
# DDP's reducer must not be the last to release a group: it waits for gloo's threads with the GIL held, which a thread
# needs to free a tensor. Python's own reference, which goes last, waits without the GIL.
_ended: list[dist.ProcessGroup | dist.Store] = []


@contextlib.contextmanager
def process_group(rank: Rank, device: torch.device, timeout: float) -> Iterator[None]:
    """Inside, all ranks are in a default process group, and have the environment variables that torchrun sets.

    If the block fails, the group is left as it is: taking it down would wait for ranks that have ended, and hide the
    error.

    Args:
        rank: this rank, with the address at which ranks meet.
        device: where it computes; decides the backend.
        timeout: seconds that the start, or a collective, may take; also for groups that are made inside.
    """
    _free_before_forks()
    free_ended_groups()
    _allow_more_files()
    limit = timedelta(seconds=timeout)
    store = _store(rank, limit)
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=limit,
        # Only NCCL needs to know the device before the first collective.
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cpu":
        # Gloo connects each rank with every other, and a rank that were done before another is connected would end it.
        dist.barrier()
    # A framework that takes this group down and makes its own meets at this store again, under keys of its own.
    with environment(rank.environment(listening=True)), default_timeout(limit):
        yield
    _ended.extend([store, *all_groups()])
    dist.destroy_process_group()


def free_ended_groups() -> None:
    """End the threads of groups that are over. A model that holds a group keeps its threads alive."""
    _ended.clear()


def keep_only_the_store() -> None:
    """End groups that are over, with their connections, but not the store: ranks that are not done may need it."""
    # Models that hold a group go first.
    gc.collect()
    _ended[:] = [ended for ended in _ended if isinstance(ended, dist.Store)]


def _store(rank: Rank, limit: timedelta) -> dist.Store:
    """The store through which all ranks meet. Rank 0 listens for the others.

    It listens only on the loopback interface: whoever reaches a store can write to it, and one that PyTorch opens
    itself listens on every interface.
    """
    if rank.rank > 0:
        return dist.TCPStore(rank.address, rank.port, rank.world_size, is_master=False, timeout=limit)
    server = socket.create_server((rank.address, rank.port), backlog=2048)
    return dist.TCPStore(
        rank.address,
        rank.port,
        rank.world_size,
        is_master=True,
        timeout=limit,
        # The store closes the socket: Python must not.
        master_listen_fd=server.detach(),
    )


def _allow_more_files() -> None:
    """Raise this process's limit on open files to the largest that the system allows.

    Gloo connects each rank with every other, once for each group. Many systems begin with 1,024 files, which include
    sockets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS says "unlimited", and then refuses it.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@functools.cache
def _free_before_forks() -> None:
    """From now on, free ended groups before this process forks, and hide from the child's collector what is left.

    Freeing a group waits for its threads. A forked process has none of them, and would hang there.
    """
    os.register_at_fork(before=free_ended_groups, after_in_child=gc.freeze)
