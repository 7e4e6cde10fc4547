"""A pool of forked ranks for tests: each call is one process group of the first n of them."""

from __future__ import annotations

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
from typing import Any

# What every rank needs, imported once, before the fork.
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
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
    """Processes 0 … size - 1. A failed call ends them all; the next call would need new ones, forked from here."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self.ends: list[connection.Connection] = []
        self.pids: list[int] = []
        for rank in range(self.size):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for end in self.ends:
                    end.close()
                _serve(rank, theirs)
            theirs.close()
            self.ends.append(ours)
            self.pids.append(pid)

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
        """New processes, after a failure or for more ranks. They come from this process, which may run OpenMP threads
        by now: on this path one thread a rank keeps GNU OpenMP from touching them."""
        self.close()
        self._start()

    def close(self) -> None:
        for end in self.ends:
            end.close()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.ends, self.pids = [], []


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
