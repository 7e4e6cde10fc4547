"""A collective that times out: which ranks have not come to it, and where every rank is, in one message.

::

    rank 0        waits in all_reduce ……… times out ─► is the first ─► asks all, waits for answers ─► says it
    ranks 1, 2    wait in all_reduce ………… time out ─► answer ───────────────────────────────────► exit
    rank 3        never comes ……………………… its watch sees that somebody asks ─► answers ──────► ends the process

Each rank has a thread for it. In a healthy run it looks at one attribute a second; the store by which the ranks have
met is asked only where the rank has not moved for a while. What a rank waits in is from PyTorch's flight recorder
(``TORCH_FR_BUFFER_SIZE``; it has gloo's collectives, not its sends and receives), where it is from its Python stack.

NCCL and XCCL end a process without asking Python. So their own timeout is later (`process_group.MARGIN`), and the
watch, which sees a collective of that age in the flight recorder, comes before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from mmm.errors import HangError
from mmm.runtime.agreement import name_hosts, name_ranks
from mmm.runtime.clock import StepClock
from mmm.runtime.contract import CONSEQUENCES, report
from mmm.runtime.ranks import Rank
from mmm.torch_private.groups import default_store, flight_recorders, group_names

STILL = 5.0  # s without a mark of the clock, from which on a rank asks the store whether somebody has timed out
ANSWERS = 5.0  # s that the first rank waits for the others' answers
LINGER = 1.0  # s in which the message is read, and the rank that says it is ahead
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
OTHERS = re.compile(
    f"/torch/|/lib/python3|<frozen|{re.escape(os.path.dirname(__file__))}"
)  # files that are not the program's
SILENT = "no answer: it is stopped or gone, or its main thread keeps Python from running others"
Stack = list[tuple[str, int, str]]  # file, line, function; the innermost last


class HangWatch:
    """For the length of a ``with`` block: what leaves it because a collective has timed out becomes a `HangError`.

    The first rank that has timed out says so, for all; the others exit without a word.

    Args:
        limit: seconds that a collective may take. clock: of the steps.
    """

    def __init__(self, rank: Rank, limit: float, clock: StepClock) -> None:
        self.rank = rank
        self.limit = limit
        self.clock = clock
        self.pause = min(max(1.0, rank.world_size / 500), limit / 10)  # s: all ranks ask one store
        self.text = ""  # the message, once it is known
        self._left = threading.Event()  # the block
        self._stack: Stack | None = None  # of the error by which it was left, of a collective or of a rank that is gone
        self._timed_out = False  # whether that error says so
        self._thread = threading.Thread(target=self._watch, name="mmm-hang", daemon=True)
        self._main = threading.get_ident()
        self._waits_in: dict[str, Any] | None = None  # the last that was seen since the clock's last mark
        self._clone: dist.Store | None = None

    def __enter__(self) -> None:  # may be entered again inside: then the inner block's error is the one that is said
        if self.rank.world_size > 1 and not self._thread.is_alive():
            self._default: Any = default_store()
            often = self._default.add(f"mmm/hang/of/{self.rank.rank}", 1)  # torchrun's own store outlives a run
            self._key = f"mmm/hang/{often}"
            self._default.set(f"{self._key}/host/{self.rank.rank}", socket.gethostname())
            self._thread.start()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, RuntimeError):
            text, stack = _with_causes(error)
            self._timed_out = TIMED_OUT.search(text) is not None
            if self._timed_out or any(sign in text for sign in CONSEQUENCES):
                self._stack = stack
        self._left.set()
        if self.rank.world_size == 1:
            return
        self._thread.join(LINGER if self._stack is None else 3 * ANSWERS + 2 * self.pause)
        if self._stack is None:
            return
        if self._timed_out and not self.text:
            self.text = (
                f"hang: rank {self.rank.rank} on {socket.gethostname()} waited for {self.limit:g} s (--timeout), at "
                f"{_place(self._stack)}. Where the others are is not known: rank 0, which has the store, does not "
                "answer"
            )
            _say(self.text)
        if self.text:
            raise HangError(self.text) from None

    # --- the watch: this thread alone asks the store, which may not answer ------------------------------------------

    def _watch(self) -> None:
        last_mark = self.clock.last_mark
        since = time.monotonic()
        while not self._left.wait(self.pause):
            if self.clock.last_mark is not last_mark:
                last_mark = self.clock.last_mark
                since = time.monotonic()
                self._waits_in = None
            with contextlib.suppress(RuntimeError, OSError):
                if self._ends(time.monotonic() - since):
                    if not self._left.wait(2 * LINGER):  # the main thread has not ended by itself
                        os._exit(1)
                    return
        if self._stack is not None:
            with contextlib.suppress(RuntimeError, OSError):  # the store has gone
                if self._timed_out or self._asked():
                    self._tell(self._stack, self._timed_out)

    def _ends(self, still: float) -> bool:
        """Whether the run ends by a hang; then this rank has told where it is.

        Args:
            still: seconds without a mark of the clock.
        """
        oldest = oldest_collective() if still > self.limit / 2 else None
        self._waits_in = oldest or self._waits_in  # PyTorch drops what has timed out before its error arrives
        late = oldest is not None and time.time() - oldest["time_created_ns"] / 1e9 > self.limit + self.pause
        if not late and not (still > min(STILL, self.limit / 2) and self._asked()):
            return False
        frames = walk_stack(sys._current_frames().get(self._main))
        self._tell(_stack(frames)[::-1], late)
        return True

    def _store(self) -> dist.Store:
        if self._clone is None:  # the main thread may be inside a call to the other
            self._clone = self._default.clone()
            self._clone.set_timeout(timedelta(seconds=2 * ANSWERS))
        return self._clone

    def _asked(self) -> bool:
        return self._store().check([f"{self._key}/asked"])

    # --- the message ------------------------------------------------------------------------------------------------

    def _tell(self, stack: Stack, timed_out: bool) -> None:
        """Answer; the first that calls it waits for all answers, and says what they are. Sets `text`, on every rank."""
        store = self._store()
        key = self._key
        first = timed_out and store.add(f"{key}/asked", 1) == 1
        store.set(f"{key}/{self.rank.rank}", json.dumps(self._answer(stack, timed_out)))
        store.add(f"{key}/answers", 1)
        patience = ANSWERS + 2 * self.pause
        if first:
            _wait(patience, lambda: store.add(f"{key}/answers", 0) >= self.rank.world_size)
            self.text = message(self.rank.rank, self._answers(store), self.limit)
            _say(self.text)
            store.set(f"{key}/text", self.text)
        else:
            _wait(patience + ANSWERS, lambda: store.check([f"{key}/text"]))
            self.text = store.get(f"{key}/text").decode()
        time.sleep(LINGER)  # rank 0 has the store

    def _answers(self, store: dist.Store) -> dict[int, dict[str, str]]:
        """What each rank has answered."""
        answers = {}
        for rank in range(self.rank.world_size):
            if store.check([f"{self._key}/{rank}"]):
                answers[rank] = json.loads(store.get(f"{self._key}/{rank}"))
            else:
                answers[rank] = {"host": store.get(f"{self._key}/host/{rank}").decode(), "at": SILENT, "in": ""}
        return answers

    def _answer(self, stack: Stack, timed_out: bool) -> dict[str, str]:
        """Where this rank is."""
        step = "before the first step" if self.clock.step is None else f"step {self.clock.step}"
        entry = oldest_collective() or (self._waits_in if timed_out else None)
        waits = ""
        if entry:
            waits = in_words(entry)
        elif timed_out or (stack and "/torch/distributed/" in stack[-1][0]):
            called = next((name for file, _, name in stack if file.endswith("/distributed_c10d.py")), stack[-1][2])
            waits = "a send or receive" if "p2p" in called else called
        waiting = f", waiting in {waits}" if waits else ""
        return {"host": socket.gethostname(), "at": f"{step}{waiting}, at {_place(stack)}", "in": waits}


def message(first: int, answers: dict[int, dict[str, str]], limit: float) -> str:
    """What all ranks have answered, in words: those that are to blame first.

    Args:
        first: the rank that has timed out first. answers: by rank.
    """
    missed = answers[first]["in"]
    late = [rank for rank, answer in answers.items() if not answer["in"]]
    late = late or [rank for rank, answer in answers.items() if answer["in"] != missed]
    who = f"all ranks are in {missed}, which did not end"
    if late:
        who = f"{name_ranks(late)} on {name_hosts([answers[rank]['host'] for rank in late])} did not come to {missed}"
    groups: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        groups.setdefault(answer["at"], []).append(rank)
    lines = [f"hang: {who} within {limit:g} s (--timeout)"]
    for text, ranks in sorted(groups.items(), key=lambda item: (item[1][0] not in late, item[1][0])):
        lines.append(f"  {name_ranks(ranks)} ({name_hosts([answers[rank]['host'] for rank in ranks])}): {text}")
    return "\n".join(lines)


def oldest_collective() -> dict[str, Any] | None:
    """The flight recorder's entry of the oldest collective that has begun here and not ended, if it has one."""
    entries: list[dict[str, Any]] = []
    for dump in flight_recorders():
        entries += json.loads(dump(True, True)).get("entries", [])
    left = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    return min(left, key=lambda entry: entry["time_created_ns"], default=None)


def in_words(entry: dict[str, Any]) -> str:
    """``all_reduce (number 12 of dp_shard, ranks 0-3, (4, 3) Float)``: of the flight recorder's entry."""
    name, description = entry["process_group"]
    count = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    axis = "the world" if description == "default_pg" else description.removeprefix("mesh_") or name
    facts = [f"number {count} of {axis}"]
    facts += [name_ranks(dist.get_process_group_ranks(group)) for group, own in group_names().items() if own == name]
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    facts += [f"{tuple(sizes)} {kind}" for sizes, kind in tensors][:4]
    return f"{entry['profiling_name'].partition(':')[2]} ({', '.join(facts)})"


def _wait(seconds: float, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


def _say(text: str) -> None:
    if not report("exit", f"{text}\n", 1):
        print(text, file=sys.stderr, flush=True)


def _stack(frames: Iterable[tuple[FrameType, int]]) -> Stack:
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def _place(stack: Stack) -> str:
    """The innermost line of the program's own."""
    own = [frame for frame in stack if not OTHERS.search(frame[0])] or stack
    file, line, name = own[-1] if own else ("?", 0, "?")
    return f"{'/'.join(file.split('/')[-3:])}:{line} in {name}"


def _with_causes(error: BaseException) -> tuple[str, Stack]:
    """What an error says and where, with what has caused it: pipelines wrap errors."""
    text = ""
    stack: Stack = []
    cause: BaseException | None = error
    while cause is not None:
        text += f"{cause}\n"
        stack += _stack(walk_tb(cause.__traceback__))
        cause = cause.__cause__
    return text, stack
