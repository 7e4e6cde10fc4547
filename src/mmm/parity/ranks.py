"""Ranks of one host, forked for one piece of work each time: nothing that a process group leaves behind can matter.

The process that forks has imported everything and computed nothing, so that a rank costs about 0.1 s. Ranks die with it
(on Linux even if it is killed), and Ctrl-C reaches it alone.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe, connection
from typing import Any, NoReturn

from mmm.contract import CONSEQUENCES
from mmm.errors import UserError
from mmm.launch.host import lifeline
from mmm.runtime.ranks import Rank

HELD = {signal.SIGINT}
SETTLE = 0.1  # s to wait, after a first failure, for one that came before it
SETTLE_DOUBTFUL = 1.0  # s, if all that is known so far looks like a consequence


class RanksFailed(Exception):
    """A rank raised, died, or gave no answer in time: which, and why, in one line. `details`: its traceback."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details


def run(function: Callable[..., Any], ranks: int, *args: Any, timeout: float) -> list[Any]:
    """Call ``function(rank, *args)`` in `ranks` new processes.

    Args:
        timeout: seconds until all have answered.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: not all did; by then none is left.
    """
    port, parent = _free_port(), os.getpid()
    pids: dict[int, int] = {}
    ends: dict[int, connection.Connection] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # or Ctrl-C could make a new rank go on as a second parent
        for number in range(ranks):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                place = Rank(number, ranks, number, ranks, "parity", "127.0.0.1", port)
                _become(parent, theirs, function, place, args)
            theirs.close()
            pids[number], ends[number] = pid, ours
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        return _collect(ends, pids, timeout)
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in pids.values():
            os.waitpid(pid, 0)
        for end in ends.values():
            end.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def _become(parent: int, end: connection.Connection, function: Callable[..., Any], rank: Rank, args: Any) -> NoReturn:
    """The life of a forked rank."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        lifeline.die_with_parent(parent)
        try:
            answer = pickle.dumps((True, function(rank, *args)))
            code = 0
        except BaseException as error:
            about = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
            answer = pickle.dumps((False, (about, traceback.format_exc())))
        end.send_bytes(answer)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # not through the interpreter's end: taking torch down takes 0.4 s


def _collect(ends: dict[int, connection.Connection], pids: dict[int, int], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, int, str, str]] = []  # doubt, rank, reason, details
    waiting, deadline = dict(ends), time.monotonic() + timeout
    while waiting:
        ready = connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            named = ", ".join(map(str, sorted(waiting)))
            raise RanksFailed(f"no answer in {timeout:g} s from rank{'s' * (len(waiting) > 1)} {named} of {len(ends)}")
        if not ready:
            break
        for rank, end in list(waiting.items()):
            if end not in ready:
                continue
            del waiting[rank]
            try:
                fine, value = pickle.loads(end.recv_bytes())
            except EOFError:
                failures.append((*_how_it_ended(pids.pop(rank), rank), ""))
            else:
                if fine:
                    results[rank] = value
                else:
                    lost = any(sign in value[1] for sign in CONSEQUENCES)
                    failures.append((int(lost), rank, *value))
        if failures:
            resolve = SETTLE_DOUBTFUL if all(doubt for doubt, *_ in failures) else SETTLE
            deadline = min(deadline, time.monotonic() + resolve)
    if failures:
        _, rank, reason, details = min(failures, key=lambda failure: failure[0])  # of equals the first
        raise RanksFailed(f"rank {rank}: {' '.join(reason.split())}", details)
    return [results[rank] for rank in range(len(ends))]


def _how_it_ended(pid: int, rank: int) -> tuple[int, int, str]:
    """Doubt, rank, and why; gloo may abort where another rank has gone."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return int(-code == signal.SIGABRT), rank, f"killed by {signal.Signals(-code).name}"
    return 0, rank, f"exited with code {code} and said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
