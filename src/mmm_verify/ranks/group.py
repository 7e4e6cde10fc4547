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

from mmm_verify.ranks.ranks import Rank
from mmm_verify.torch_private import all_groups, default_timeout

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}

# What the last `process_group` left: its store, and its groups. They stay until ranks meet again, or the process forks.
# DDP's reducer must not be the last to let a group go: it waits for gloo's threads with Python's lock held, which a
# thread needs to free a tensor. Python's own reference, which goes last, waits without the lock.
_ended: list[dist.ProcessGroup | dist.Store] = []


@contextlib.contextmanager
def process_group(rank: Rank, device: torch.device, timeout: float) -> Iterator[None]:
    """The default process group of all ranks.

    Where the block fails, the group is left as it is: taking it down would wait for ranks that are gone, and hide the
    error.

    Args:
        timeout: seconds that a collective, or the start, may take, of groups made inside too.
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
        device_id=device if device.type == "cuda" else None,
    )
    with default_timeout(limit):
        yield
    _ended.extend([store, *all_groups()])
    dist.destroy_process_group()


def free_ended_groups() -> None:
    """End the threads of groups that are over. A model that has a group keeps it."""
    _ended.clear()


def _store(rank: Rank, limit: timedelta) -> dist.Store:
    """The store that all ranks share. Rank 0 listens on the loopback interface alone: who reaches it can write to it,
    and PyTorch's own listens on every interface."""
    if rank.rank > 0:
        return dist.TCPStore(rank.address, rank.port, rank.world_size, is_master=False, timeout=limit)
    server = socket.create_server((rank.address, rank.port), backlog=2048)
    return dist.TCPStore(
        rank.address,
        rank.port,
        rank.world_size,
        is_master=True,
        timeout=limit,
        master_listen_fd=server.detach(),
    )


def _allow_more_files() -> None:
    """Gloo connects each rank with every other, once a group. Many systems begin with 1,024 files, sockets included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS says "unlimited", and refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@functools.cache
def _free_before_forks() -> None:
    """A forked process has none of the threads that a group waits for when it is freed: its collector leaves alone what
    came from its parent, or it hangs there."""
    os.register_at_fork(before=free_ended_groups, after_in_child=gc.freeze)
