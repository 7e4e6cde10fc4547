"""Ranks forked for one piece of work, and what is said of those that fail."""

from __future__ import annotations

import contextlib
import io
import pickle
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mmm_verify.errors import is_for_user
from mmm_verify.ranks.children import LEAVE, Child, Children, ended

PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections
GRACE = 0.1  # s to wait, after a first failure, for one that came before it
IN_TORCH = "torch/distributed"  # in the frames of a rank that is in a collective
GRACE_DOUBTFUL = 1.0  # s, if all that is known so far looks like a consequence
# What a rank's traceback says when it failed because another had gone.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "DistNetworkError",
    "DistStoreError",
    "failed to recv",
    "Timed out waiting",
    "NCCL communicator was aborted",
)


@dataclass(frozen=True)
class Rank:
    """One of the ranks forked together, all of this host.

    Its attributes are named as those of a rank that a launcher has started, so that a program takes either.

    Attributes:
        rank, world_size: 0 ≤ rank < world_size. local_rank, local_world_size: the same.
        source: who has started it.
        address, port: where rank 0's store listens.
        store: by which the ranks have met; None before.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: str
    address: str
    port: int
    store: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this one prints and writes for all."""
        return self.rank == 0


def ranks_of(world_size: int, port: int) -> list[Rank]:
    """The ranks of a group that meets at a port of this host."""
    return [Rank(rank, world_size, rank, world_size, "forked", "127.0.0.1", port) for rank in range(world_size)]


def free_port() -> int:
    """A TCP port of this host that nobody listens on. The system itself would give one that any connection of another
    process may take before rank 0 listens on it."""
    for port in (*secrets.SystemRandom().sample(PORTS, 100), 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("this host has no free port")


class RanksFailed(Exception):
    """A rank raised, died, or gave no answer in time: which, and why, in one line.

    Attributes:
        details: its traceback; of ranks that gave no answer, where each of them was.
        frames: the same, by rank.
    """

    def __init__(self, reason: str, details: str = "", frames: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.details, self.frames = details, dict(frames or {})


def fork_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float, interrupt: Connection | None = None
) -> list[Any]:
    """Call ``function(rank, *args)`` in `ranks` new processes, which have no process group yet. Each computes on one
    thread, which it can whatever this process has computed before.

    Args:
        function: any; it is not pickled. What it returns has to be, tensors in it by their own elements alone: a view
            does not take the whole tensor along. timeout: seconds until all have answered.
        interrupt: where a message ends the ranks before their time.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: not all did; by then none is left.
    """
    with Children() as children:
        for rank in ranks_of(ranks, free_port()):
            children.fork(lambda end, rank=rank: answer(end, function, rank, *args))  # type: ignore[misc]
        return collect(children.all, timeout, interrupt)


class _Pickler(pickle.Pickler):
    """Takes of a tensor that is a view its own elements: PyTorch would take all of the memory that it looks into."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        if value.is_quantized or value.device.type == "meta":
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
            return NotImplemented
        own = value.detach().clone()
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(own, value.requires_grad).__reduce_ex__(self.proto)
        return own.requires_grad_(value.requires_grad).__reduce_ex__(self.proto)

    proto = pickle.DEFAULT_PROTOCOL


def dumps(value: Any) -> bytes:
    """`pickle.dumps`, of views without what they look into."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def answer(end: Connection, function: Callable[..., Any], *args: Any) -> None:
    """On a rank: send what ``function(*args)`` returns, or how it failed, to `collect`."""
    try:
        message = dumps((True, function(*args)))
    except BaseException as error:
        reason = str(error) if is_for_user(error) else f"{type(error).__name__}: {error}"
        message = pickle.dumps((False, (reason, traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    end.send_bytes(message)


def collect(ranks: Sequence[Child], timeout: float, interrupt: Connection | None = None) -> list[Any]:
    """The answer of each rank; RanksFailed names the one whose failure caused the others."""
    results: dict[int, Any] = {}
    failures: list[tuple[bool, int, str, str]] = []  # whether it may be a consequence, rank, reason, details
    waiting = {child.end: number for number, child in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while waiting:
        ends = [*waiting, interrupt] if interrupt is not None else [*waiting]
        ready = wait(ends, max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            named = ", ".join(map(str, sorted(waiting.values())))
            reason = f"no answer in {timeout:g} s from rank{'s' * (len(waiting) > 1)} {named} of {len(ranks)}"
            frames = {number: ranks[number].frames() for number in waiting.values()}
            where = "\n".join(f"rank {number}:\n{stack}" for number, stack in frames.items())
            raise RanksFailed(reason, where, frames)
        if not ready:
            break
        if interrupt in ready:
            raise RanksFailed(f"interrupted: {interrupt.recv()}")  # type: ignore[union-attr]
        for end, number in [(end, number) for end, number in waiting.items() if end in ready]:
            del waiting[end]
            try:
                fine, value = pickle.loads(end.recv_bytes())
            except (EOFError, OSError):
                code = ranks[number].stop(LEAVE)
                # gloo may abort where another rank has gone
                failures.append((code == -signal.SIGABRT, number, ended(code), ranks[number].last_frames()))
            else:
                if fine:
                    results[number] = value
                else:
                    failures.append((any(sign in value[1] for sign in CONSEQUENCES), number, *value))
        if failures:
            grace = GRACE_DOUBTFUL if all(doubtful for doubtful, *_ in failures) else GRACE
            deadline = min(deadline, time.monotonic() + grace)
    if failures:
        _, number, reason, details = min(failures, key=lambda failure: failure[0])  # of equals the first
        raise RanksFailed(f"rank {number}: {' '.join(reason.split())}", details)
    return [results[number] for number in range(len(ranks))]


def blame(frames: Mapping[int, str], ranks: int) -> str:
    """Which ranks the others waited for: those that had ended, or were not in a collective.

    Args:
        frames: of `RanksFailed`: those of the ranks that gave no answer. ranks: how many there were.
    """
    ended = sorted(set(range(ranks)) - set(frames))
    elsewhere = sorted(rank for rank, stack in frames.items() if IN_TORCH not in _main_thread(stack))
    inside = sorted(set(frames) - set(elsewhere))
    if ended and inside:
        return f"rank {listed(inside)} waited in a collective, and rank {listed(ended)} had ended: it made fewer calls"
    if elsewhere and inside:
        return f"rank {listed(inside)} waited in a collective to which rank {listed(elsewhere)} did not come"
    return "all of them were in collectives: not in the same one" if inside else "none of them was in a collective"


def _main_thread(stack: str) -> str:
    """Of the frames of a process those of the thread that runs the test: its own are said last."""
    return stack.rpartition("Current thread")[2] or stack


def listed(ranks: Sequence[int]) -> str:
    """``0, 2, 3``"""
    return ", ".join(map(str, ranks))
