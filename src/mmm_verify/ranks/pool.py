"""A pool of ranks that stay: tests ask a process that computes nothing, and it forks the ranks and asks them."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

# What every rank needs, imported once, before the fork.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from mmm_verify.ranks.children import Children
from mmm_verify.ranks.group import free_ended_groups, process_group
from mmm_verify.ranks.ranks import Rank, RanksFailed, answer, collect, dumps, fork_ranks, free_port, ranks_of
from mmm_verify.torch_private import clear_redistribute_cache, clear_sharding_cache

TIMEOUT = 300.0  # s that a call may take: on a busy machine, each thread of gloo waits long for a core
LONGER = 10.0  # s that the pool waits beyond it: a collective that hangs says on its rank where


class RankPool:
    """Ranks 0, 1, …, as many as a call needs. A failed call ends them, and the next has new ones.

    They are forked by a process that is itself forked here and computes nothing: one that has used DTensors or OpenMP
    threads leaves its children caches and locks that they cannot use. So make the pool before this process computes.
    """

    def __init__(self) -> None:
        self._children = Children()
        self._server = self._children.fork(partial(_serve, _caches()))

    def run(
        self, function: Callable[..., Any], ranks: int, *args: Any, timeout: float = TIMEOUT, fresh: bool = False
    ) -> list[Any]:
        """Call ``function(rank, *args)`` on ranks 0 … ranks - 1, inside a process group of theirs.

        Args:
            function: a function of a module; it goes to the ranks by its name, and `args` and results by value.
            fresh: on new processes instead, which have no process group, and are gone afterwards.

        Returns:
            What each rank returned, by rank.

        Raises:
            RanksFailed: one of them raised, died or gave no answer in `timeout` seconds; with its traceback.
        """
        self._server.end.send((ranks, timeout, fresh, dumps((function, args))))
        try:
            results, reason, details = self._server.receive(timeout + 2 * LONGER)
        except BaseException as error:  # such as a test's own time-out: the next call must not get this one's answer
            self._server.end.send(type(error).__name__)
            self._server.receive(LONGER)
            raise
        if reason:
            raise RanksFailed(f"{reason}\n{details}", details)
        return results

    def close(self) -> None:
        """End the ranks."""
        self._children.end()


def _serve(caches: list[Any], end: Connection) -> None:
    """Answer `RankPool.run` until it is gone."""
    clear_sharding_cache()  # so that what it imports is there before the fork
    with Children() as ranks, contextlib.suppress(EOFError):
        while True:
            request = end.recv()
            if isinstance(request, str):  # an interrupt that came too late
                continue
            count, timeout, fresh, job = request
            try:
                if fresh:
                    results = fork_ranks(_call, count, job, timeout=timeout, interrupt=end)
                else:
                    while len(ranks.all) < count:
                        ranks.fork(partial(_serve_rank, caches))
                    for child, rank in zip(ranks.all, ranks_of(count, free_port()), strict=False):
                        with contextlib.suppress(OSError):  # it has died since: `collect` says how
                            child.end.send((rank, timeout, job))
                    results = collect(ranks.all[:count], timeout + LONGER, end)
                end.send((results, "", ""))
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
    with process_group(rank, torch.device("cpu"), timeout):
        result = _call(rank, job)
        dist.barrier()  # a rank that leaves while another still connects ends that one's start
    # DTensor keeps what it has found for a mesh, with the names of groups that are gone after a call.
    clear_sharding_cache()
    _release_groups(caches)
    free_ended_groups()
    return result


def _caches() -> list[Any]:
    """PyTorch's caches in Python of what ranks compute."""
    # By its type: `isinstance` asks the object, and a proxy of one that is gone raises.
    found = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [cache for cache in found if str(cache.__module__).startswith("torch.distributed.")]


def _release_groups(caches: list[Any]) -> None:
    """End the threads of a call's groups.

    DTensor's caches keep meshes, and these their groups. Each gloo group has a thread that wakes 100 times a second:
    200 of them take a quarter of a core from the tests that follow.

    Args:
        caches: those from before the fork, which the collector does not look at here.
    """
    clear_redistribute_cache()
    for cache in (*caches, *_caches()):
        cache.cache_clear()
    gc.collect()
