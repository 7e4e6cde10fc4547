"""The life of the default process group: up, with a timeout and a clear error, and down again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.contract import ENDING, MARKER_VARIABLE
from mmm.errors import LaunchError
from mmm.runtime.device import backend_for
from mmm.runtime.ranks import Rank


@contextlib.contextmanager
def process_group(
    rank: Rank, device: torch.device, timeout: float = 600.0, meet: Callable[[dist.Store], None] | None = None
) -> Iterator[None]:
    """The default process group of all ranks, for the length of a ``with`` block.

    A group made inside has the same timeout. A process that is alone gets a group of one, so that the same program runs
    on a laptop. When the block fails, the group is left as it is: taking it down would wait for ranks that are gone,
    and hide the error.

    Args:
        timeout: seconds that a collective, or the start, may take.
        meet: called with a store that all ranks share, before any backend and device is set up: what it raises on every
            rank costs no waiting for ranks that another backend would never meet.

    Raises:
        LaunchError: rank 0 cannot listen on MASTER_PORT.
    """
    limit = timedelta(seconds=timeout)
    options: dict = {"backend": backend_for(device), "timeout": limit}
    if device.type in ("cuda", "xpu"):
        options["device_id"] = device
    if rank.source == "alone":
        alone = dist.HashStore()
        if meet is not None:
            meet(alone)
        dist.init_process_group(store=alone, rank=0, world_size=1, **options)
    else:
        # While ranks meet, a signal makes PyTorch print C++ frames and go on. launch kills who does not heed it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if MARKER_VARIABLE in os.environ else ())
        try:
            where = f"tcp://{rank.address}:{rank.port}"
            store, *_ = next(dist.rendezvous(where, rank.rank, rank.world_size, timeout=limit))
            store.set_timeout(limit)
            if meet is not None:
                meet(store)
            prefixed = dist.PrefixStore("default_pg", store)  # as PyTorch does with a store that it makes
            dist.init_process_group(store=prefixed, rank=rank.rank, world_size=rank.world_size, **options)
        except dist.DistNetworkError as error:
            if rank.is_main and "EADDRINUSE" in str(error):
                raise LaunchError(
                    f"MASTER_PORT {rank.port} is already in use on {rank.address}: choose another port "
                    f"(MASTER_PORT=…), or unset it and let `launch` find a free one"
                ) from None
            raise LaunchError(
                f"rank {rank.rank} cannot reach rank 0 at {rank.address}:{rank.port} "
                f"(MASTER_ADDR, MASTER_PORT): {error}"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with default_timeout(limit):
        yield
    dist.destroy_process_group()


@contextlib.contextmanager
def default_timeout(limit: timedelta) -> Iterator[None]:
    """Inside, a process group that is made without a timeout gets this one, whatever its backend.

    The groups of a `DeviceMesh` are made without one, and do not take over the default group's. Afterwards PyTorch can
    change it for gloo and nccl alone: those of xccl would wait half an hour. Options by axis (``backend_override``) are
    newer than the oldest PyTorch that is supported, and there are none for a backend such as ``cpu:gloo,xpu:xccl``.
    """
    c10d = dist.distributed_c10d
    default = c10d._get_default_timeout
    c10d._get_default_timeout = lambda backend: limit
    try:
        yield
    finally:
        c10d._get_default_timeout = default


# PyTorch 2.13 has a new name for it, and warns of the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_floats(values: list[float] | Tensor, device: torch.device, columns: int | None = None) -> list[list[float]]:
    """Every rank's `values` (the same number on each), by rank. A collective: all ranks call it.

    Args:
        values: (n,), if a tensor, on `device`. columns: how many of each rank's are wanted here; None for all.

    Returns:
        world_size lists.
    """
    world = dist.get_world_size()
    if world == 1:
        return [list(values) if isinstance(values, list) else values.tolist()]
    own = torch.tensor(values, dtype=torch.float64, device=device) if isinstance(values, list) else values
    everyone = own.new_empty(world * len(own))
    all_gather(everyone, own)
    return everyone.view(world, -1)[:, :columns].tolist()
