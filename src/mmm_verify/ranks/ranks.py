"""Ranks forked for one piece of work, and the message about those that fail."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mmm_verify.errors import ConfigError, describe, is_for_user
from mmm_verify.ranks.children import LEAVE, Child, Children, ended, flush

# Below the ports that systems give to outgoing connections.
PORTS = range(20_000, 32_000)
# Seconds to wait, after a first failure, for the message of one that came before it.
GRACE = 0.1
# The same, if every failure so far looks like the consequence of another.
GRACE_DOUBTFUL = 1.0
# Paths in the frames of a rank that is in a collective.
IN_COLLECTIVE = ("torch/distributed", "torch/nn/parallel/distributed")
# A function in the frames of a rank that is in backward, which may compute, or wait for other ranks' gradients.
IN_BACKWARD = "_engine_run_backward"
# What a rank's traceback says if it failed because another rank had ended.
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
    """One of the ranks forked together, all on this host.

    It has the attributes of a rank that a launcher has started, so that a program takes either.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        local_rank: the rank on its host, the same as `rank`.
        local_world_size: number of ranks on its host, the same as `world_size`.
        source: who has started it.
        address: where rank 0's store listens.
        port: its port.
        store: the store through which the ranks have met; None before.
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
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    def environment(self, listening: bool) -> dict[str, str]:
        """The environment variables that torchrun sets on a rank of one host. Frameworks learn their place from them.

        Args:
            listening: whether a store already listens at the address. Then ``init_process_group()`` connects to it, as
                it does to the store of torchrun's agent. Otherwise rank 0 opens one there.
        """
        rank = str(self.rank)
        world_size = str(self.world_size)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            # The group is the hosts' agents: there is one.
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            # `torch.distributed.is_torchelastic_launched()` looks for this one.
            "TORCHELASTIC_RUN_ID": f"forked-{self.port}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        if listening:
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return variables


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these environment variables as well. Afterwards they are as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def ranks_of(world_size: int, port: int) -> list[Rank]:
    """The ranks of a group that meets at a port of this host."""
    return [Rank(rank, world_size, rank, world_size, "forked", "127.0.0.1", port) for rank in range(world_size)]


def free_port() -> int:
    """A TCP port of this host on which nobody listens.

    The system would give a port that it also gives to outgoing connections: one of another process might take it before
    rank 0 listens. So random ports below those are tried first.
    """
    for port in (*secrets.SystemRandom().sample(PORTS, 100), 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("this host has no free port")


class RanksFailed(Exception):
    """A rank raised, died, or gave no answer in time. The message says in one line which rank, and why.

    Attributes:
        details: its traceback; for ranks that gave no answer, where each of them was.
        frames: for ranks that gave no answer: rank → where it was.
        code: exit code of a rank that died, negative for a signal; None if no rank did, or if it cannot be killed.
    """

    def __init__(
        self, reason: str, details: str = "", frames: Mapping[int, str] | None = None, code: int | None = None
    ) -> None:
        super().__init__(reason)
        self.details = details
        self.frames = dict(frames or {})
        self.code = code


def fork_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float, interrupt: Connection | None = None
) -> list[Any]:
    """Call ``function(rank, *args)`` in `ranks` new processes, which have no process group yet.

    Each computes on one thread, whatever this process has computed before, and has the environment variables of a rank
    that torchrun has started.

    Args:
        function: any function; it is not pickled, but what it returns is. A tensor is sent with its own elements: a
            view does not bring the full tensor along.
        ranks: number of ranks.
        *args: its other arguments, which are not pickled either.
        timeout: seconds until all ranks must have answered.
        interrupt: a connection on which a message ends the ranks early.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: not all ranks returned. None of them is left.
    """
    with Children() as children:
        for rank in ranks_of(ranks, free_port()):
            children.fork(lambda end, rank=rank: _live(end, function, rank, *args))  # type: ignore[misc]
        return collect(children.all, timeout, interrupt)


def fork_one(purpose: str, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Call ``function(*args)`` in a new process, and return what it returns.

    A process that forks ranks must not compute itself: they would inherit its threads' locks, but not the threads.

    Args:
        purpose: what the call is for, as a message begins with it.
        timeout: seconds that it may take.

    Raises:
        UserError: the function has raised it.
        ConfigError: the process died, or took too long.
    """
    try:
        ((error, value),) = fork_ranks(_value_or_error, 1, function, args, timeout=timeout)
    except RanksFailed as failure:
        raise ConfigError(f"{purpose}: {str(failure).removeprefix('rank 0: ')}") from None
    if error is not None:
        raise error
    return value


def _value_or_error(rank: Rank, function: Callable[..., Any], args: Sequence[Any]) -> tuple[Exception | None, Any]:
    """What a function returns, or an error for the user."""
    try:
        return None, function(*args)
    except Exception as error:
        if not is_for_user(error):
            raise
        # A new error has no cause and no traceback, which might not pickle.
        return type(error)(str(error)), None


def _live(end: Connection, function: Callable[..., Any], rank: Rank, *args: Any) -> None:
    """The life of a rank: it calls the function, and ends. Rank 0 ends with the last of them."""
    os.environ.update(rank.environment(listening=False))
    answer(end, function, rank, *args)
    group = sys.modules.get("mmm_verify.ranks.group")
    if rank.is_main and group is not None:
        # The others meet at this rank's store. One that is late would fail if this rank ended before it.
        group.keep_only_the_store()
        with contextlib.suppress(EOFError, OSError):
            end.recv()


class _Pickler(pickle.Pickler):
    """Pickles only the own elements of a tensor that is a view. PyTorch would pickle all of the storage under it.

    A tensor goes as its bytes: PyTorch would make an archive of each, of which a thousand take half a second.
    """

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        # Other kinds of tensors, such as DTensors and sparse ones, pickle themselves.
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        if value.is_quantized or value.device.type == "meta" or value.__dict__:
            return NotImplemented
        own = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = ctypes.string_at(own.data_ptr(), own.nbytes)
        return _tensor_of, (content, own.dtype, own.shape, value.device, type(value), value.requires_grad)


def _tensor_of(content: bytes, dtype: Any, shape: Any, device: Any, kind: Any, requires_grad: bool) -> Any:
    """The tensor that was pickled as its bytes."""
    import torch

    own = torch.empty(shape, dtype=dtype)
    ctypes.memmove(own.data_ptr(), content, len(content))
    own = own.to(device)
    if kind is torch.nn.Parameter:
        return kind(own, requires_grad)
    return own.requires_grad_(requires_grad)


def dumps(value: Any) -> bytes:
    """`pickle.dumps`, except that a view is pickled without the tensor that it is a view of."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def answer(end: Connection, function: Callable[..., Any], *args: Any) -> None:
    """On a rank: send `collect` what ``function(*args)`` returns, or how it failed."""
    try:
        message = dumps((True, function(*args)))
    except BaseException as error:
        reason = describe(error)
        if is_for_user(error):
            # Its message says everything.
            reason = " ".join(str(error).split())
        message = pickle.dumps((False, (reason, traceback.format_exc())))
    flush()
    end.send_bytes(message)


@dataclass(frozen=True)
class _Failure:
    """A rank that raised or died.

    Attributes:
        doubtful: whether it may only be the consequence of another rank's failure.
        rank: the rank.
        reason: its error, in one line.
        details: its traceback.
        code: its exit code if it died; see `RanksFailed`.
    """

    doubtful: bool
    rank: int
    reason: str
    details: str
    code: int | None = None


def collect(ranks: Sequence[Child], timeout: float, interrupt: Connection | None = None) -> list[Any]:
    """Wait for the answer of each rank.

    Args:
        ranks: the processes, by rank.
        timeout: seconds until all must have answered.
        interrupt: a connection on which a message ends the wait.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: not all ranks returned. It names the rank whose failure caused the others.
    """
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    rank_of = {child.end: rank for rank, child in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while rank_of:
        ends = [*rank_of]
        if interrupt is not None:
            ends.append(interrupt)
        ready = wait(ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            # With a failure, this was only the grace for others: no rank is blamed for a missing answer.
            if failures:
                break
            raise _no_answer(ranks, list(rank_of.values()), timeout)
        if interrupt is not None and interrupt in ready:
            raise RanksFailed(f"interrupted: {interrupt.recv()}")
        for end in [end for end in rank_of if end in ready]:
            rank = rank_of.pop(end)
            try:
                returned, value = pickle.loads(end.recv_bytes())
            except (EOFError, OSError):
                # It died. gloo may abort a rank when another one has ended.
                code = ranks[rank].stop(LEAVE)
                aborted = code == -signal.SIGABRT
                failures.append(_Failure(aborted, rank, ended(code), ranks[rank].last_frames(), code))
                continue
            if returned:
                results[rank] = value
            else:
                reason, details = value
                doubtful = any(sign in details for sign in CONSEQUENCES)
                failures.append(_Failure(doubtful, rank, reason, details))
        if failures:
            # Wait a little: the cause may answer after its consequences.
            only_doubtful = all(failure.doubtful for failure in failures)
            grace = GRACE_DOUBTFUL if only_doubtful else GRACE
            deadline = min(deadline, time.monotonic() + grace)
    if failures:
        # The first that is not doubtful; if all are, the first.
        cause = min(failures, key=lambda failure: failure.doubtful)
        raise RanksFailed(f"rank {cause.rank}: {cause.reason}", cause.details, code=cause.code)
    return [results[rank] for rank in range(len(ranks))]


def _no_answer(children: Sequence[Child], silent: list[int], timeout: float) -> RanksFailed:
    """The error about ranks that gave no answer in time, with where each of them is."""
    named = "ranks" if len(silent) > 1 else "rank"
    reason = f"no answer in {timeout:g} s from {named} {listed(sorted(silent))} of {len(children)}"
    frames = {}
    sections = []
    for rank in silent:
        frames[rank] = children[rank].frames()
        sections.append(f"rank {rank}:\n{frames[rank]}")
    return RanksFailed(reason, "\n".join(sections), frames)


def blame(frames: Mapping[int, str], ranks: int) -> str:
    """Say which ranks the others waited for: those that had ended, or were not in a collective.

    Args:
        frames: where each rank was that gave no answer; see `RanksFailed`.
        ranks: number of all ranks.
    """
    others = [rank for rank in range(ranks) if rank not in frames]
    elsewhere: list[int] = []
    in_backward: list[int] = []
    inside: list[int] = []
    for rank in sorted(frames):
        stack = _main_thread(frames[rank])
        if any(path in stack for path in IN_COLLECTIVE):
            inside.append(rank)
        elif IN_BACKWARD in stack:
            in_backward.append(rank)
        else:
            elsewhere.append(rank)
    # Backward waits for the others where one of them is neither in it nor in a collective.
    if elsewhere or others:
        inside = sorted(inside + in_backward)
    else:
        elsewhere = in_backward
    if others and inside:
        return (
            f"rank {listed(inside)} waited in a collective, but rank {listed(others)} had already ended: it made fewer "
            "calls"
        )
    if elsewhere and inside:
        return f"rank {listed(inside)} waited in a collective that rank {listed(elsewhere)} did not reach"
    if inside:
        return "all of them were in collectives, but not in the same one"
    return "none of them was in a collective"


def _main_thread(stack: str) -> str:
    """The frames of the thread that runs the program: faulthandler lists the current thread last."""
    return stack.rpartition("Current thread")[2] or stack


def listed(ranks: Sequence[int]) -> str:
    """``0, 2, 3``"""
    return ", ".join(map(str, ranks))
