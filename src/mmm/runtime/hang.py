"""Explains a collective that times out: which ranks did not reach it, and where every rank is, in one message.

::

    rank 0        waits in all_reduce ……… times out ─► is the first ─► asks all, waits for answers ─► prints it
    ranks 1, 2    wait in all_reduce ………… time out ─► answer ───────────────────────────────────► exit
    rank 3        never comes ……………………… its watch sees that a rank asks ─► answers ─────────► ends the process

Each rank has a thread for this, its watch. In a healthy run the thread looks at one attribute a second; it only asks
the store by which the ranks have met once the rank has not moved for a while. What a rank waits in comes from PyTorch's
flight recorder (``TORCH_FR_BUFFER_SIZE``; it records gloo's collectives, but not gloo's sends and receives); where the
rank is comes from its Python stack.

NCCL and XCCL end a process without asking Python. So their own timeout is later (`process_group.MARGIN`), and the
watch, which sees a collective of that age in the flight recorder, comes first.
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
from mmm.runtime.ranks import Rank
from mmm.torch_private.groups import default_store, flight_recorders, group_names
from mmm_launch.contract import CONSEQUENCES, report

# Seconds without a mark of the clock, after which a rank asks the store whether another rank has timed out.
STILL = 5.0

# Seconds that the rank which timed out first waits for the others' answers.
ANSWERS = 5.0

# Seconds that a rank which has lost a connection, while it waited in a collective, gives another one to ask.
ASKED_WITHIN = 2.0

# Seconds in which the message is read, and by which the rank that prints it is ahead.
LINGER = 1.0

TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)

# Paths of files that are not the program's own.
OTHERS = re.compile(f"/torch/|/lib/python3|<frozen|{re.escape(os.path.dirname(__file__))}")

# The flight recorder has the names of C++ types. Those of the others are PyTorch's, apart from capital letters.
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
SILENT = "no answer: it is stopped or gone, or its main thread keeps Python from running others"

# File, line and function of each frame; the innermost frame is the last.
Stack = list[tuple[str, int, str]]


class HangWatch:
    """Turns the error of a collective that has timed out inside its ``with`` block into a `HangError`.

    The first rank that times out prints a message for all; the others exit silently.

    Args:
        rank: this process's place.
        limit: seconds that a collective may take.
        clock: clock of the steps, which shows whether the rank moves.
    """

    def __init__(self, rank: Rank, limit: float, clock: StepClock) -> None:
        self.rank = rank
        self.limit = limit
        self.clock = clock
        # Seconds between two looks of the watch. All ranks may ask one store, so that large runs look less often.
        self.pause = min(max(1.0, rank.world_size / 500), limit / 10)
        # The message, once it is known.
        self.text = ""
        # Set when the block is left.
        self._left = threading.Event()
        # Stack of the error by which the block was left, if it is about a collective or a rank that is gone.
        self._stack: Stack | None = None
        # Whether that error says that a collective has timed out.
        self._timed_out = False
        self._thread = threading.Thread(target=self._watch, name="mmm-hang", daemon=True)
        self._main = threading.get_ident()
        # The last collective under way that was seen since the clock's last mark: an entry of the flight recorder.
        self._waits_in: dict[str, Any] | None = None
        self._clone: dist.Store | None = None

    def __enter__(self) -> None:
        # The watch may be entered again inside its block. Then the inner block's error is the one that is printed.
        if self.rank.world_size > 1 and not self._thread.is_alive():
            self._default: Any = default_store()
            # torchrun's store outlives a run: each watch has keys of its own in it.
            count = self._default.add(f"mmm/hang/of/{self.rank.rank}", 1)
            self._key = f"mmm/hang/{count}"
            self._default.set(f"{self._key}/host/{self.rank.rank}", socket.gethostname())
            self._thread.start()

    def __exit__(
        self,
        kind: Any,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError):
            text, stack = _with_causes(error)
            self._timed_out = TIMED_OUT.search(text) is not None
            if self._timed_out or any(sign in text for sign in CONSEQUENCES):
                self._stack = stack
        self._left.set()
        if self.rank.world_size == 1:
            return
        if self._stack is None:
            self._thread.join(LINGER)
            return
        # The watch now asks the other ranks, or answers the one that asks, and sets `text`.
        self._thread.join(3 * ANSWERS + 2 * self.pause)
        if self._timed_out and not self.text:
            self.text = (
                f"hang: rank {self.rank.rank} on {socket.gethostname()} waited for {self.limit:g} s (--timeout), at "
                f"{_place(self._stack)}. Where the others are is not known: rank 0, which has the store, does not "
                "answer"
            )
            _say(self.text)
        if self.text:
            raise HangError(self.text) from None

    def _watch(self) -> None:
        """Run the watch's thread. Only this thread asks the store, which may not answer."""
        last_mark = self.clock.last_mark
        since = time.monotonic()
        while not self._left.wait(self.pause):
            if self.clock.last_mark is not last_mark:
                last_mark = self.clock.last_mark
                since = time.monotonic()
                self._waits_in = None
            with contextlib.suppress(RuntimeError, OSError):
                if self._ends(time.monotonic() - since):
                    # The main thread may still wait in the collective, and would not end by itself.
                    if not self._left.wait(2 * LINGER):
                        os._exit(1)
                    return
        if self._stack is not None:
            # The store may have gone with rank 0.
            with contextlib.suppress(RuntimeError, OSError):
                if self._timed_out or self._asked_soon():
                    self._tell(self._stack, self._timed_out)

    def _ends(self, still: float) -> bool:
        """Whether the run ends by a hang. If so, this rank has told where it is.

        Args:
            still: seconds without a mark of the clock.
        """
        late = False
        if still > self.limit / 2:
            oldest = oldest_collective()
            if oldest is not None:
                # It is remembered because PyTorch drops a collective that has timed out before its error arrives.
                self._waits_in = oldest
                age = time.time() - oldest["time_created_ns"] / 1e9
                late = age > self.limit + self.pause
        if not late:
            asks = still > min(STILL, self.limit / 2)
            if not (asks and self._asked()):
                return False
        frames = walk_stack(sys._current_frames().get(self._main))
        # `walk_stack` begins with the innermost frame.
        self._tell(_stack(frames)[::-1], late)
        return True

    def _store(self) -> dist.Store:
        """This thread's own connection to the store: the main thread may be inside a call to the other one."""
        if self._clone is None:
            self._clone = self._default.clone()
            self._clone.set_timeout(timedelta(seconds=2 * ANSWERS))
        return self._clone

    def _asked(self) -> bool:
        return self._store().check([f"{self._key}/asked"])

    def _asked_soon(self) -> bool:
        """Whether another rank asks, now or shortly after this rank has lost a connection.

        The rank that times out first closes its connections, and asks only then. A rank that did not wait in a
        collective has lost its connection for another reason, and does not wait for a question either.
        """
        if self._waits_in is not None:
            _wait(ASKED_WITHIN, self._asked)
        return self._asked()

    def _tell(self, stack: Stack, timed_out: bool) -> None:
        """Leave this rank's answer in the store, and set `text`, on every rank.

        The first rank that has timed out waits for all answers, and prints them as one message.
        """
        store = self._store()
        key = self._key
        is_first = timed_out and store.add(f"{key}/asked", 1) == 1
        # A rank that has lost its connection has no collective under way any more, as one that has timed out.
        answer = self._answer(stack, timed_out or self._stack is not None)
        store.set(f"{key}/{self.rank.rank}", json.dumps(answer))
        store.add(f"{key}/answers", 1)
        patience = ANSWERS + 2 * self.pause
        if is_first:
            _wait(patience, lambda: store.add(f"{key}/answers", 0) >= self.rank.world_size)
            self.text = message(self.rank.rank, self._answers(store), self.limit)
            _say(self.text)
            store.set(f"{key}/text", self.text)
        else:
            _wait(patience + ANSWERS, lambda: store.check([f"{key}/text"]))
            self.text = store.get(f"{key}/text").decode()
        # Rank 0 holds the store, from which the others still read the text.
        time.sleep(LINGER)

    def _answers(self, store: dist.Store) -> dict[int, dict[str, str]]:
        """Read what each rank has answered; rank → answer."""
        answers = {}
        for rank in range(self.rank.world_size):
            if store.check([f"{self._key}/{rank}"]):
                text = store.get(f"{self._key}/{rank}")
                answers[rank] = json.loads(text)
            else:
                host = store.get(f"{self._key}/host/{rank}").decode()
                answers[rank] = {"host": host, "at": SILENT, "in": ""}
        return answers

    def _answer(self, stack: Stack, timed_out: bool) -> dict[str, str]:
        """Describe where this rank is.

        Returns:
            ``host``; ``in``, the collective that it waits in, or ""; ``at``, a sentence with its step and its line.
        """
        entry = oldest_collective()
        if entry is None and timed_out:
            entry = self._waits_in
        waits_in = ""
        if entry:
            waits_in = in_words(entry)
        elif timed_out or (stack and "/torch/distributed/" in stack[-1][0]):
            # Gloo's sends and receives have no entry: the stack tells the function of torch.distributed.
            called = [function for file, _, function in stack if file.endswith("/distributed_c10d.py")]
            function = called[0] if called else stack[-1][2]
            waits_in = "a send or receive" if "p2p" in function else function
        where = f"step {self.clock.step}"
        if self.clock.step is None:
            where = "before the first step"
        if waits_in:
            where += f", waiting in {waits_in}"
        return {"host": socket.gethostname(), "at": f"{where}, at {_place(stack)}", "in": waits_in}


def message(first: int, answers: dict[int, dict[str, str]], limit: float) -> str:
    """Put the answers of all ranks into one message: the ranks that caused the hang first.

    Args:
        first: the rank that timed out first.
        answers: rank → its answer.
        limit: seconds that a collective may take.
    """
    missed = answers[first]["in"]
    # To blame are the ranks that are in no collective; if there are none, those that are in another one.
    late = [rank for rank, answer in answers.items() if not answer["in"]]
    if not late:
        late = [rank for rank, answer in answers.items() if answer["in"] != missed]
    if late:
        late_hosts = name_hosts([answers[rank]["host"] for rank in late])
        who = f"{name_ranks(late)} on {late_hosts} did not reach {missed}"
    else:
        who = f"all ranks are in {missed}, which did not end"
    # Ranks that are at the same place share a line.
    places: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        places.setdefault(answer["at"], []).append(rank)

    def order(item: tuple[str, list[int]]) -> tuple[bool, int]:
        first_rank = item[1][0]
        return first_rank not in late, first_rank

    lines = [f"hang: {who} within {limit:g} s (--timeout)"]
    for place, ranks in sorted(places.items(), key=order):
        hosts = name_hosts([answers[rank]["host"] for rank in ranks])
        lines.append(f"  {name_ranks(ranks)} ({hosts}): {place}")
    return "\n".join(lines)


def oldest_collective() -> dict[str, Any] | None:
    """Return the flight recorder's entry of the oldest collective of this process that has begun and not ended."""
    entries: list[dict[str, Any]] = []
    for dump in flight_recorders():
        recorded = json.loads(dump(True, True))
        entries += recorded.get("entries", [])
    under_way = []
    for entry in entries:
        if not entry["retired"] and entry["state"] != "completed":
            under_way.append(entry)
    return min(under_way, key=lambda entry: entry["time_created_ns"], default=None)


def waits_for_others(thread: int) -> bool:
    """Whether a thread of this process waits for other ranks: in a collective, or in a send or receive.

    Args:
        thread: its identifier, as `threading.get_ident` returns it.
    """
    if oldest_collective() is not None:
        return True
    frame = sys._current_frames().get(thread)
    return frame is not None and "/torch/distributed/" in frame.f_code.co_filename


def in_words(entry: dict[str, Any]) -> str:
    """Describe an entry of the flight recorder: ``all_reduce (call 12 of group tp, ranks 0-3, (4, 3) float32)``."""
    name, description = entry["process_group"]
    count = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    if description == "default_pg":
        group_in_words = "the world group"
    else:
        group_in_words = f"group {description.removeprefix('mesh_') or name}"
    facts = [f"call {count} of {group_in_words}"]
    for group, group_name in group_names().items():
        if group_name == name:
            facts.append(name_ranks(dist.get_process_group_ranks(group)))
    # A collective may have hundreds of tensors: the line names a few.
    tensors = list(zip(entry["input_sizes"], entry["input_dtypes"], strict=False))
    for shape, dtype in tensors[:4]:
        facts.append(f"{tuple(shape)} {DTYPES.get(dtype, dtype.lower())}")
    # "gloo:all_reduce" → "all_reduce"
    collective = entry["profiling_name"].partition(":")[2]
    return f"{collective} ({', '.join(facts)})"


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
    """Name the innermost line that is the program's own; if there is none, the innermost line."""
    if not stack:
        return "?:0 in ?"
    own = [frame for frame in stack if not OTHERS.search(frame[0])]
    file, line, function = (own or stack)[-1]
    short_path = "/".join(file.split("/")[-3:])
    return f"{short_path}:{line} in {function}"


def _with_causes(error: BaseException) -> tuple[str, Stack]:
    """Return the text and the stack of an error and of all that have caused it: pipelines wrap errors."""
    text = ""
    stack: Stack = []
    cause: BaseException | None = error
    while cause is not None:
        text += f"{cause}\n"
        stack += _stack(walk_tb(cause.__traceback__))
        cause = cause.__cause__
    return text, stack
