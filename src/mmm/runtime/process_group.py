"""Sets the default process group up, with a timeout and clear errors, and takes it down again."""

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
from mmm.runtime.device import backend_for, identity
from mmm.runtime.ranks import DRY_RUN, LOOPBACK, Rank
from mmm.torch_private.groups import can_split, default_group, default_timeout, group_names
from mmm_launch.contract import ENDING, MARKER_VARIABLE, open_files, unreachable

# Seconds by which the timeouts of NCCL and XCCL are later than `mmm.runtime.hang`'s. These backends end a process
# without asking Python: the watch has to come first to say where each rank waits.
MARGIN = timedelta(seconds=20)

# Seconds that a process which had a group sleeps at its end.
LINGER = 0.05
FULL = "Too many open files"

# The groups of the last `process_group` that ended. They are kept until ranks meet again, the process forks (a fork has
# none of their threads), or the process ends (while Python shuts down, a thread that needs its lock ends the process).
# DDP's reducer must not hold the last reference to a group: it waits for gloo's threads with Python's lock held, and
# such a thread needs that lock to free a tensor. Python's own reference, which goes last, waits without the lock.
_ended: list[dist.ProcessGroup] = []

# The store of this process's last meeting, by its address and the ranks that meet there. The next meeting uses it
# again: if it were closed and opened anew, a rank that is early would find the old one, which then closes under it.
_store: dict[tuple, dist.Store] = {}


@contextlib.contextmanager
def process_group(
    rank: Rank,
    device: torch.device,
    timeout: float = 600.0,
    on_rendezvous: Callable[[dist.Store], None] | None = None,
) -> Iterator[None]:
    """Set up the default process group of all ranks for the length of a ``with`` block.

    Groups made inside have the same timeout. A process that runs alone gets a group of one rank, so that the same
    program runs on a laptop. When the block fails, the group is left as it is: taking it down would wait for ranks that
    are gone, and hide the error.

    Args:
        rank: this process's place among all ranks.
        device: device whose tensors the group communicates; it decides the backend.
        timeout: seconds that a collective, or the start, may take; on accelerators `MARGIN` more.
        on_rendezvous: called with a store that all ranks share, before any backend and device is set up. If it raises
            the same error on every rank, no rank waits for others that would never come.

    Raises:
        LaunchError: rank 0 cannot listen on MASTER_PORT, or a rank may not open enough files.
        DeviceError: two ranks have one device. It is raised on every rank.
    """
    _free_in_time()
    free_ended_groups()
    limit = timedelta(seconds=timeout)
    if device.type in ("cuda", "xpu"):
        limit += MARGIN
    # Gloo connects each rank with every other, once for each group: more sockets than 1,024, the limit on many systems.
    # With TORCH_GLOO_LAZY_INIT=1 it connects when ranks first send, but a rank that leaves then takes the sockets away
    # from those that are still connecting: barrier, then destroy, on 16 ranks failed in 4 of 30 runs, and in 0 without.
    with _files(open_files()):
        yield from _group(rank, device, limit, on_rendezvous)


@contextlib.contextmanager
def _files(limit: int) -> Iterator[None]:
    """Inside, an error that says there are too many open files becomes a `LaunchError` that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if FULL not in str(error):
            raise
        raise LaunchError(
            f"a rank's groups need more than the {limit} files that a process may have open: raise this limit "
            "(ulimit -n), or the system's"
        ) from error


def _group(
    rank: Rank,
    device: torch.device,
    limit: timedelta,
    on_rendezvous: Callable[[dist.Store], None] | None,
) -> Iterator[None]:
    options: dict = {"backend": backend_for(device), "timeout": limit}
    if device.type in ("cuda", "xpu"):
        options["device_id"] = device
        # The warning is about sends that wait for each other. A pipeline's sends have groups of their own, except for
        # the shapes that stages send in the first step.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    with _shared_store(rank, limit) as store:
        if on_rendezvous is not None:
            on_rendezvous(store)
        if "device_id" in options and rank.world_size > 1:
            check_devices(store, rank, identity(device))
        # The second group of a process uses the first one's store. Under the same keys, ranks would connect to the
        # addresses at which the others listened before.
        prefix = unique_key(store, rank, "groups")
        prefixed = dist.PrefixStore(prefix, store)
        dist.init_process_group(
            store=prefixed,
            rank=rank.rank,
            world_size=rank.world_size,
            **options,
        )
    with default_timeout(limit), bound_if_it_splits():
        yield
    _ended.extend(group_names())
    dist.destroy_process_group()


def free_ended_groups() -> None:
    """End the threads of groups that are over, except of those that a model still refers to."""
    _ended.clear()


@functools.cache
def _free_in_time() -> None:
    """Register, once in a process, that ended groups are freed before a fork and before Python shuts down."""

    def free() -> None:
        free_ended_groups()
        if not dist.is_initialized():
            _store.clear()

    # A forked process has none of the threads that a group waits for when it is freed. Its garbage collector has to
    # leave alone what came from its parent, or it hangs there, or frees memory twice.
    os.register_at_fork(before=free, after_in_child=gc.freeze)
    # atexit calls the last registered first, so this sleep comes last. After a collective is done, one of gloo's
    # threads still lets its tensors go and needs Python's lock for it. If it asks while Python shuts down, the process
    # ends with SIGABRT.
    atexit.register(time.sleep, LINGER)
    atexit.register(free)


def locate(rank: Rank, timeout: float = 600.0) -> Rank:
    """Return `rank` with its local rank and local world size.

    Where the launcher did not tell them, they follow from the hosts of all ranks. That takes a collective.

    Args:
        rank: this process's place among all ranks.
        timeout: seconds that the meeting may take.

    Raises:
        LaunchError: as in `process_group`.
    """
    if rank.local_rank is not None and rank.local_world_size is not None:
        return rank
    with _shared_store(rank, timedelta(seconds=timeout)) as store:
        hosts = find_hosts(store, rank)
    own_host = hosts[rank.rank]
    peers = [other for other, host in enumerate(hosts) if host == own_host]
    local_rank = rank.local_rank
    if local_rank is None:
        local_rank = peers.index(rank.rank)
    return replace(rank, local_rank=local_rank, local_world_size=len(peers), store=store)


@contextlib.contextmanager
def _shared_store(rank: Rank, limit: timedelta) -> Iterator[dist.Store]:
    """Give the store that all ranks share, for the length of a ``with`` block in which they meet."""
    # Until the ranks have met, a signal would make PyTorch print C++ frames and continue. `launch` kills a rank that
    # does not react to a signal.
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
    meeting = (rank.address, rank.port, rank.rank, rank.world_size)
    if meeting not in _store:
        _store.clear()
        if rank.address in LOOPBACK:
            # Some containers have no loopback interface.
            problem = unreachable(rank.address)
            if problem:
                raise LaunchError(
                    f"this host cannot reach itself at {rank.address} ({problem}), where its ranks are to meet: it has "
                    "no loopback interface, or that is down.\n  As root: ip link set lo up. Or give the container one."
                )
        if _listens_here(rank):
            _store[meeting] = _listen_here(rank, limit)
        else:
            _store[meeting] = _connect(rank, limit)
    store = _store[meeting]
    store.set_timeout(limit)
    # torchrun's agent keeps one store while it starts the ranks again: each meeting has a prefix of its own in it.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return dist.PrefixStore(f"mmm/meeting/{rendezvous(store, rank)}", store)
    return store


def _connect(rank: Rank, limit: timedelta) -> dist.Store:
    """Reach rank 0's store by PyTorch's own rendezvous; on rank 0 this creates the store."""
    host = rank.address
    if ":" in (rank.address or ""):
        # An IPv6 address stands in brackets in a URL.
        host = f"[{rank.address}]"
    meetings = dist.rendezvous(f"tcp://{host}:{rank.port}", rank.rank, rank.world_size, timeout=limit)
    store, *_ = next(meetings)
    return store


def _listens_here(rank: Rank) -> bool:
    """Whether this rank creates the store, and all ranks are on its host."""
    return rank.is_main and rank.address in LOOPBACK and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def _listen_here(rank: Rank, limit: timedelta) -> dist.Store:
    """Create the store of a run on one host, which only listens on the loopback interface.

    PyTorch's own listens on every interface, and whoever reaches a store can write to it.
    """
    family = socket.AF_INET
    if ":" in (rank.address or ""):
        family = socket.AF_INET6
    try:
        server = socket.create_server((rank.address, rank.port), family=family, backlog=2048)
    except OSError as error:
        error_name = errno.errorcode.get(error.errno or 0, "")
        raise dist.DistNetworkError(f"{error_name}: {error.strerror}") from None
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

    If the default group is bound, PyTorch makes every group of a mesh by splitting it, and fails where XCCL cannot
    (2.12, 2.13). Where a backend can split, groups are made faster so, and FSDP2 has been seen to hang without. Besides
    splitting, the binding only says which device a barrier uses; without it, that is the current one.
    """
    group = None
    if dist.is_initialized():
        group = default_group()
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


# PyTorch 2.13 has new names for these two, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_table(own: Tensor) -> Tensor:
    """Gather every rank's `own` on every rank. A collective: all ranks call it.

    Args:
        own: this rank's values, (n,).

    Returns:
        Row r is rank r's `own`: (world_size, n), on the device of `own`.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return own[None]
    everyone = own.new_empty(world_size * len(own))
    all_gather(everyone, own)
    # (world_size * n,) → (world_size, n)
    return everyone.view(world_size, -1)


def gather_floats(values: list[float] | Tensor, device: torch.device) -> list[list[float]]:
    """Gather every rank's `values` on every rank. A collective: all ranks call it.

    Args:
        values: this rank's n values, n being the same on each rank; a tensor of shape (n,) has to be on `device`.
        device: device by which the ranks communicate.

    Returns:
        One list of n values for each rank.
    """
    if not isinstance(values, list):
        return gather_table(values).tolist()
    if dist.get_world_size() == 1:
        return [list(values)]
    # Some devices have no float64: its 64 bits travel as an integer's.
    own = torch.tensor(values, dtype=torch.float64).view(torch.int64)
    table = gather_table(own.to(device)).cpu()
    return table.view(torch.float64).tolist()


def gather_objects(rank: Rank, local: Any) -> list[Any]:
    """Gather every rank's `local` on rank 0, by rank; the other ranks get an empty list. A collective."""
    if rank.world_size == 1:
        return [local]
    if rank.source == DRY_RUN:
        return []
    by_rank: list[Any] | None = None
    if rank.is_main:
        by_rank = [None] * rank.world_size
    dist.gather_object(local, by_rank)
    return by_rank or []


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return rank `source`'s `value` on every rank. A collective."""
    values = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values, source)
    return values[0]
