"""The life of the default process group: up, with a timeout and a clear error, and down again."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.errors import LaunchError
from mmm.runtime.agreement import check_devices, find_hosts, rendezvous, unique_key
from mmm.runtime.contract import ENDING, LOOPBACK, MARKER_VARIABLE, check_loopback, open_files
from mmm.runtime.device import backend_for, identity
from mmm.runtime.ranks import DRY_RUN, Rank
from mmm.torch_private.groups import can_split, default_group, default_timeout, group_names

# By which NCCL and XCCL, which end a process without asking Python, give up later than `mmm.runtime.hang`.
MARGIN = timedelta(seconds=20)

LINGER = 0.05  # s, at the end of a process that had a group
FULL = "Too many open files"

# The groups of the last `process_group` that ended, until ranks meet again, the process forks (a fork has none of their
# threads), or it ends (while Python does, a thread that needs its lock ends the process). DDP's reducer must not be the
# last to let a group go: it waits for gloo's threads with Python's lock held, which a thread needs to free a tensor.
# Python's own reference, which goes last, waits without the lock.
_ended: list[dist.ProcessGroup] = []

# The store of this process's last meeting, by where it is and who meets there. It stays for the next: closed and opened
# again, a rank that is early would find the old one, which closes under it.
_store: dict[tuple, dist.Store] = {}


@contextlib.contextmanager
def process_group(
    rank: Rank, device: torch.device, timeout: float = 600.0, on_rendezvous: Callable[[dist.Store], None] | None = None
) -> Iterator[None]:
    """The default process group of all ranks, for the length of a ``with`` block.

    A group made inside has the same timeout. A process that is alone gets a group of one, so that the same program runs
    on a laptop. When the block fails, the group is left as it is: taking it down would wait for ranks that are gone,
    and hide the error.

    Args:
        timeout: seconds that a collective, or the start, may take; on accelerators `MARGIN` more.
        on_rendezvous: called with a store that all ranks share, before any backend and device is set up: what it raises
            on every rank costs no waiting for ranks that another backend would never meet.

    Raises:
        LaunchError: rank 0 cannot listen on MASTER_PORT, or a rank may not open enough files. DeviceError: two ranks
            have one device; on every rank.
    """
    _free_in_time()
    free_ended_groups()
    limit = timedelta(seconds=timeout) + (MARGIN if device.type in ("cuda", "xpu") else timedelta())
    # Gloo connects each rank with every other, once a group: more sockets than 1,024, which many systems begin with.
    # With TORCH_GLOO_LAZY_INIT=1 it connects when ranks first send, but a rank that leaves then takes the sockets away
    # from those that are still connecting: barrier, then destroy, on 16 ranks failed in 4 of 30 runs, and without in 0.
    with _files(open_files()):
        yield from _group(rank, device, limit, on_rendezvous)


@contextlib.contextmanager
def _files(limit: int) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if FULL not in str(error):
            raise
        raise LaunchError(
            f"a rank's groups need more than the {limit} files that a process may have open: raise it (ulimit -n), "
            "or the system's limit"
        ) from error


def _group(
    rank: Rank, device: torch.device, limit: timedelta, on_rendezvous: Callable[[dist.Store], None] | None
) -> Iterator[None]:
    options: dict = {"backend": backend_for(device), "timeout": limit}
    if device.type in ("cuda", "xpu"):
        options["device_id"] = device
        # Of sends that wait for each other: a pipeline's have groups of their own, but for shapes in its first step.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    with _shared_store(rank, limit) as store:
        if on_rendezvous is not None:
            on_rendezvous(store)
        if "device_id" in options and rank.world_size > 1:
            check_devices(store, rank, identity(device))
        # A process's second group has the first one's store: by the same keys, ranks would connect where the others
        # listened before.
        prefixed = dist.PrefixStore(unique_key(store, rank, "groups"), store)
        dist.init_process_group(store=prefixed, rank=rank.rank, world_size=rank.world_size, **options)
    with default_timeout(limit), bound_if_it_splits():
        yield
    _ended.extend(group_names())
    dist.destroy_process_group()


def free_ended_groups() -> None:
    """End the threads of groups that are over. A model that has a group keeps it."""
    _ended.clear()


@functools.cache
def _free_in_time() -> None:
    def free() -> None:
        free_ended_groups()
        if not dist.is_initialized():
            _store.clear()

    # A forked process has none of the threads that a group waits for when it is freed: its collector leaves alone what
    # came from its parent, or it hangs there, or frees memory twice.
    os.register_at_fork(before=free, after_in_child=gc.freeze)
    # Last, so registered first: a thread of gloo lets a collective's tensors go after it has said that it is done, and
    # needs Python's lock for it. Where it asks while Python ends, it ends the process with SIGABRT.
    atexit.register(time.sleep, LINGER)
    atexit.register(free)


def locate(rank: Rank, timeout: float = 600.0) -> Rank:
    """`rank` with its local numbers. Where nothing has said them, they come from the hosts of all ranks: a collective.

    Args:
        timeout: seconds that the meeting may take.

    Raises:
        LaunchError: as `process_group`.
    """
    if rank.local_rank is not None and rank.local_world_size is not None:
        return rank
    with _shared_store(rank, timedelta(seconds=timeout)) as store:
        hosts = find_hosts(store, rank)
    peers = [other for other, host in enumerate(hosts) if host == hosts[rank.rank]]
    local_rank = peers.index(rank.rank) if rank.local_rank is None else rank.local_rank
    return replace(rank, local_rank=local_rank, local_world_size=len(peers), store=store)


@contextlib.contextmanager
def _shared_store(rank: Rank, limit: timedelta) -> Iterator[dist.Store]:
    """The store that all ranks share, while they meet.

    Until they have met, a signal would make PyTorch print C++ frames and go on. launch kills who does not heed it.
    """
    meets = rank.source != "alone" and MARKER_VARIABLE in os.environ
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if meets else ())
    try:
        yield rank.store or _find_store(rank, limit)
    except dist.DistNetworkError as error:
        if FULL in str(error):
            raise
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
    where = (rank.address, rank.port, rank.rank, rank.world_size)
    if where not in _store:
        _store.clear()
        if rank.address in LOOPBACK:
            check_loopback(rank.address)
        _store[where] = _listen_here(rank, limit) if _listens_here(rank) else _connect(rank, limit)
    store = _store[where]
    store.set_timeout(limit)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return dist.PrefixStore(f"mmm/meeting/{rendezvous(store, rank)}", store)
    return store


def _connect(rank: Rank, limit: timedelta) -> dist.Store:
    address = f"[{rank.address}]" if ":" in (rank.address or "") else rank.address
    store, *_ = next(dist.rendezvous(f"tcp://{address}:{rank.port}", rank.rank, rank.world_size, timeout=limit))
    return store


def _listens_here(rank: Rank) -> bool:
    """Whether this rank has the store, and all ranks are on its host."""
    return rank.is_main and rank.address in LOOPBACK and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def _listen_here(rank: Rank, limit: timedelta) -> dist.Store:
    """The store of a run on one host: who reaches it can write to it, and PyTorch's own listens on every interface."""
    family = socket.AF_INET6 if ":" in (rank.address or "") else socket.AF_INET
    try:
        server = socket.create_server((rank.address, rank.port), family=family, backlog=2048)
    except OSError as error:
        raise dist.DistNetworkError(f"{errno.errorcode.get(error.errno or 0, '')}: {error.strerror}") from None
    return dist.TCPStore(
        rank.address or "",
        rank.port or 0,
        rank.world_size,
        is_master=True,
        timeout=limit,
        multi_tenant=True,
        master_listen_fd=server.detach(),
    )


@contextlib.contextmanager
def bound_if_it_splits() -> Iterator[None]:
    """Inside, the default group is bound to its device only if its backend can split groups.

    PyTorch splits every group of a mesh off a default group that is bound, and fails where XCCL cannot (2.12, 2.13).
    Groups of a backend that can are made faster so, and FSDP2 has been seen to hang without. Besides splitting, the
    binding only says which device a barrier uses; without it, that is the current one.
    """
    group = default_group() if dist.is_initialized() else None
    device = getattr(group, "bound_device_id", None)
    if group is None or device is None or can_split(group, device):
        yield
        return
    group.bound_device_id = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
            yield
    finally:
        group.bound_device_id = device


# PyTorch 2.13 has new names for them, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_table(own: Tensor) -> Tensor:
    """Every rank's `own`, (n,), by rank: (world_size, n), on the device. A collective: all ranks call it."""
    world = dist.get_world_size()
    if world == 1:
        return own[None]
    everyone = own.new_empty(world * len(own))
    all_gather(everyone, own)
    return everyone.view(world, -1)


def gather_floats(values: list[float] | Tensor, device: torch.device) -> list[list[float]]:
    """Every rank's `values` (the same number on each), by rank: world_size lists. A collective: all ranks call it.

    Args:
        values: (n,), if a tensor, on `device`.
    """
    if isinstance(values, list):
        if dist.get_world_size() == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64).view(torch.int64)  # some devices have no float64
        return gather_table(own.to(device)).cpu().view(torch.float64).tolist()
    return gather_table(values).tolist()


def gather_objects(rank: Rank, local: Any) -> list[Any]:
    """Every rank's `local`, by rank, on rank 0; empty on the others. A collective."""
    if rank.world_size == 1:
        return [local]
    if rank.source == DRY_RUN:
        return []
    by_rank: list[Any] | None = [None] * rank.world_size if rank.is_main else None
    dist.gather_object(local, by_rank)
    return by_rank or []


def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """What rank `source` has as `value`, on every rank. A collective. group: of all ranks; None: the default one."""
    only = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(only, source, group=group)
    return only[0]
