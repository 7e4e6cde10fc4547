"""A pool of forked ranks for tests: each call is one process group of the first n of them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing.connection as connection
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

# What every rank needs, imported once, before the fork.
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, debug

from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import Rank

TIMEOUT = 60.0


class RankFailed(Exception):
    """A rank raised: its own traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankPool:
    """Processes 0 … size - 1. A failed call ends them all, and the next has new ones.

    All are forked from a process that is itself forked when the pool is made, and computes nothing: one that has used
    DTensors or OpenMP threads leaves its children caches and locks that they cannot use.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nursery, theirs = socket.socketpair()
        self.nurse = os.fork()
        if self.nurse == 0:
            self.nursery.close()
            _nurse(theirs)
        theirs.close()
        self._start()

    def _start(self) -> None:
        self.ends: list[connection.Connection] = []
        self.pids: list[int] = []
        for rank in range(self.size):
            self.nursery.sendall(rank.to_bytes(4, "big"))
            pid, fds, _, _ = socket.recv_fds(self.nursery, 4, 1)
            self.ends.append(connection.Connection(fds[0]))
            self.pids.append(int.from_bytes(pid, "big"))

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call ``function(rank, *args)`` on ranks 0 … world_size - 1, inside a process group of theirs."""
        if world_size > self.size:
            self.size = world_size
            self._restart()
        where = (inspect.getfile(function), function.__qualname__)
        port = free_port()
        for rank in range(world_size):
            self.ends[rank].send((where, world_size, port, timeout, args))
        results: dict[int, Any] = {}
        waiting = dict(enumerate(self.ends[:world_size]))
        while waiting:
            ready = connection.wait(list(waiting.values()), timeout=timeout + 10)
            if not ready:
                self._restart()
                raise RankFailed(f"ranks {sorted(waiting)} gave no answer in {timeout + 10:.0f} s")
            for rank, end in list(waiting.items()):
                if end in ready:
                    try:
                        ok, value = end.recv()
                    except EOFError:
                        ok, value = False, "the process died"
                    if not ok:
                        self._restart()
                        raise RankFailed(f"rank {rank} of {world_size}:\n{value}")
                    results[rank] = value
                    del waiting[rank]
        return [results[rank] for rank in range(world_size)]

    def _restart(self) -> None:
        """New processes, after a failure or for more ranks."""
        self._end()
        self._start()

    def _end(self) -> None:
        for end in self.ends:
            end.close()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ends, self.pids = [], []

    def close(self) -> None:
        self._end()
        self.nursery.close()
        os.waitpid(self.nurse, 0)


def _nurse(requests: socket.socket) -> NoReturn:
    """Fork a rank whenever its number comes, and answer with its pid and our end of a pipe to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while number := requests.recv(4):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            ours.close()
            _serve(int.from_bytes(number, "big"), theirs)
        socket.send_fds(requests, [pid.to_bytes(4, "big")], [ours.fileno()])
        ours.close()
        theirs.close()
    os._exit(0)


def _load(file: str, qualname: str) -> Callable[..., Any]:
    name = "ranks_" + Path(file).stem
    if getattr(sys.modules.get(name), "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], qualname)


def _forget_meshes() -> None:
    """DTensor keeps what it has worked out for a mesh, with the names of groups that are gone after a call."""
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # PyTorch 2.8
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def _serve(rank: int, end: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            where, world_size, port, timeout, args = end.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            me = Rank(rank, world_size, rank, world_size, "pool", "127.0.0.1", port)
            with process_group(me, torch.device("cpu"), timeout):
                result = _load(*where)(me, *args)
            _forget_meshes()
            end.send((True, result))
        except BaseException:
            end.send((False, traceback.format_exc()))
            os._exit(1)


def meeting_only(rank: Rank, device: torch.device, timeout: float, meet: Callable[[Any], None]) -> Any:
    """For a program that is called on a rank of the pool, in place of a process group of its own: the one there is."""
    meet(_get_default_store())
    return contextlib.nullcontext()
