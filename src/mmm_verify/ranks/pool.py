"""A pool of ranks that stay. Tests ask a process that computes nothing, which forks the ranks and asks them."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

# Every rank needs these: imported once, before the fork.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from mmm_verify.ranks.children import Children
from mmm_verify.ranks.group import free_ended_groups, process_group
from mmm_verify.ranks.ranks import Rank, RanksFailed, answer, collect, dumps, fork_ranks, free_port, ranks_of
from mmm_verify.torch_private import clear_redistribute_cache, clear_sharding_cache, forget_meshes

# Seconds that a call may take: on a busy machine, each of gloo's threads waits long for a core.
TIMEOUT = 300.0
# Seconds that the pool waits beyond it: a collective that hangs then says on its rank where.
MARGIN = 10.0


class RankPool:
    """Ranks 0, 1, …, as many as a call needs. A failed call ends them, and the next call gets new ones.

    They are forked by a process that is itself forked here and computes nothing: a process that has used DTensors or
    OpenMP threads leaves its children caches and locks that they cannot use. So make the pool before this process
    computes.
    """

    def __init__(self) -> None:
        self._children = Children()
        self._server = self._children.fork(partial(_serve, _caches()))

    def run(
        self, function: Callable[..., Any], ranks: int, *args: Any, timeout: float = TIMEOUT, fresh: bool = False
    ) -> list[Any]:
        """Call ``function(rank, *args)`` on ranks 0 … ranks - 1, inside their process group.

        Args:
            function: a function of a module. It is sent to the ranks by name; `args` and results are sent by value.
            ranks: number of ranks.
            *args: its other arguments.
            timeout: seconds until all ranks must have answered.
            fresh: whether to use new processes, which have no process group and end afterwards.

        Returns:
            What each rank returned, by rank.

        Raises:
            RanksFailed: a rank raised, died or gave no answer in time. Its traceback is in the message.
        """
        self._server.end.send((ranks, timeout, fresh, dumps((function, args))))
        try:
            results, reason, details = self._server.receive(timeout + 2 * MARGIN)
        # A test's own time-out may end it. The server must not answer this call when the next one asks.
        except BaseException as error:
            self._server.end.send(type(error).__name__)
            self._server.receive(MARGIN)
            raise
        if reason:
            raise RanksFailed(f"{reason}\n{details}", details)
        return results

    def close(self) -> None:
        """End the ranks."""
        self._children.end()


def _serve(caches: list[Any], end: Connection) -> None:
    """The life of the process that forks the ranks: answer `RankPool.run` until the pool is gone."""
    # This imports modules that each rank would otherwise import itself.
    clear_sharding_cache()
    with Children() as ranks, contextlib.suppress(EOFError):
        while True:
            request = end.recv()
            # The message that interrupts a call came after its answer.
            if isinstance(request, str):
                continue
            n_ranks, timeout, fresh, job = request
            try:
                if fresh:
                    results = fork_ranks(_call, n_ranks, job, timeout=timeout, interrupt=end)
                else:
                    while len(ranks.all) < n_ranks:
                        ranks.fork(partial(_serve_rank, caches))
                    for child, rank in zip(ranks.all, ranks_of(n_ranks, free_port()), strict=False):
                        # A rank may have died since the last call: `collect` says how.
                        with contextlib.suppress(OSError):
                            child.end.send((rank, timeout, job))
                    results = collect(ranks.all[:n_ranks], timeout + MARGIN, end)
                # What `receive` unpickles: sent by `end.send`, each tensor would be an archive.
                end.send_bytes(dumps((results, "", "")))
            except RanksFailed as error:
                ranks.end()
                end.send((None, str(error), error.details))


def _serve_rank(caches: list[Any], end: Connection) -> None:
    """The life of a rank that stays."""
    with contextlib.suppress(EOFError):
        while True:
            rank, timeout, job = end.recv()
            answer(end, _call_in_group, rank, timeout, job, caches)


def _call(rank: Rank, job: bytes) -> Any:
    function, args = pickle.loads(job)
    return function(rank, *args)


def _call_in_group(rank: Rank, timeout: float, job: bytes, caches: list[Any]) -> Any:
    """Call a function inside a process group of all ranks, and forget afterwards what PyTorch caches for the group."""
    with process_group(rank, torch.device("cpu"), timeout):
        result = _call(rank, job)
        # All ranks: one that leaves while another still connects would make that one's start fail.
        dist.barrier()
    # DTensor caches results for a mesh by the names of its groups, which the next call's groups will have again.
    clear_sharding_cache()
    _release_groups(caches)
    free_ended_groups()
    return result


def _caches() -> list[Any]:
    """The ``lru_cache`` functions of torch.distributed."""
    caches = []
    for candidate in gc.get_objects():
        # Not isinstance, which asks the object for its class: a proxy whose object is gone raises.
        if type(candidate) is functools._lru_cache_wrapper and str(candidate.__module__).startswith(
            "torch.distributed."
        ):
            caches.append(candidate)
    return caches


def _release_groups(caches: list[Any]) -> None:
    """End the threads of a call's groups.

    DTensor's caches keep meshes, which keep their groups. Each gloo group has a thread that wakes 100 times a second:
    200 of them take a quarter of a core from the tests that follow.

    Args:
        caches: the caches from before the fork, which the collector of a forked process does not list.
    """
    clear_redistribute_cache()
    forget_meshes()
    for cache in (*caches, *_caches()):
        cache.cache_clear()
    gc.collect()
