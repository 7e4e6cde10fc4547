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
from mmm.torch_private.module import MODULE_CALL

STILL = 5.0  # s without a mark of the clock, from which on a rank asks the store whether somebody has timed out
ANSWERS = 5.0  # s that the first rank waits for the others' answers
LINGER = 1.0  # s in which the message is read, and the rank that says it is ahead
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
OTHERS = re.compile("/torch/|/lib/python3|<frozen|/mmm/runtime/")  # files that are not the program's
PARTS = {  # function → part of the step
    "all_batches": "data",
    MODULE_CALL: "forward",
    "forward_one_chunk": "forward",
    "backward": "backward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "perform_reduce_grad": "backward",
    "clip_grad_norm": "gradient clipping",
    "not_finite": "optimizer",
    "unscale_": "optimizer",
    "balance_experts": "optimizer",
    "evaluate": "evaluation",
    "evaluate_images": "evaluation",
    "validate": "evaluation",
    "row": "row",
}
Stack = list[tuple[str, int, str]]  # file, line, function; the innermost last


class HangWatch:
    """For the length of a ``with`` block: what leaves it because a collective has timed out becomes a `HangError`.

    The first rank that has timed out says so, for all; the others exit without a word.

    Args:
        limit: seconds that a collective may take. clock: of the steps.
    """

    def __init__(self, rank: Rank, limit: float, clock: StepClock) -> None:
        self.rank, self.limit, self.clock = rank, limit, clock
        self.pause = min(max(1.0, rank.world_size / 500), limit / 10)  # s: all ranks ask one store
        self._stop, self._lock, self._answered = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="mmm-hang", daemon=True)
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
        self._stop.set()
        if self.rank.world_size == 1:
            return
        if not isinstance(error, RuntimeError):
            self._thread.join(LINGER)
            return
        text, stack = _all_of(error)
        late = bool(TIMED_OUT.search(text))
        if not late and not any(sign in text for sign in CONSEQUENCES):
            return
        texts: list[str] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone
                if late or self._default.check([f"{self._key}/asked"]):
                    texts.append(self._tell(stack, late))

        thread = threading.Thread(target=ask, daemon=True)  # a store whose process is stopped answers to nothing, ever
        thread.start()
        thread.join(3 * ANSWERS + 2 * self.pause)
        if late and not texts:
            own = self._answer(stack, late)
            texts.append(
                f"hang: rank {self.rank.rank} on {own['host']} waited for {self.limit:g} s (--timeout) in {own['in']}: "
                f"{own['at']}, at {own['line']}. Where the others are is not known: rank 0, which has the store, does "
                f"not answer"
            )
            _say(texts[0])
        if texts:
            raise HangError(texts[0]) from None

    # --- the watch ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last, since = self.clock.last_mark, time.monotonic()
        while not self._stop.wait(self.pause):
            now = time.monotonic()
            if self.clock.last_mark is not last:
                last, since, self._waits_in = self.clock.last_mark, now, None
            with contextlib.suppress(RuntimeError, OSError):
                entry = oldest_collective() if now - since > self.limit / 2 else None
                self._waits_in = entry or self._waits_in  # PyTorch drops what has timed out before its error arrives
                late = entry is not None and _age(entry) > self.limit + self.pause
                if late or (now - since > min(STILL, self.limit / 2) and self._asked()):
                    stack = _stack(sys._current_frames().get(self._main))
                    if self._stop.is_set():  # the main thread has timed out too, and answers by its error
                        return
                    self._tell(stack, timed_out=late)
                    if not self._stop.wait(2 * LINGER):  # the main thread has not ended by itself
                        os._exit(1)

    def _store(self) -> dist.Store:
        with self._lock:
            if self._clone is None:  # the main thread may be inside a call to the other
                self._clone = self._default.clone()
                self._clone.set_timeout(timedelta(seconds=2 * ANSWERS))
            return self._clone

    def _asked(self) -> bool:
        return self._store().check([f"{self._key}/asked"])

    # --- the message ------------------------------------------------------------------------------------------------

    def _tell(self, stack: Stack, timed_out: bool) -> str:
        """Answer; the first that calls it waits for all answers, and says what they are. The text, on every rank."""
        store = self._store()
        with self._lock:
            first = timed_out and not self._answered and store.add(f"{self._key}/asked", 1) == 1
            if not self._answered:
                self._answered = True
                store.set(f"{self._key}/{self.rank.rank}", json.dumps(self._answer(stack, timed_out)))
                store.add(f"{self._key}/answers", 1)
        deadline = time.monotonic() + ANSWERS + 2 * self.pause
        if not first:
            while not store.check([f"{self._key}/text"]):
                if time.monotonic() > deadline + ANSWERS:
                    raise RuntimeError("the rank that has timed out first has gone")
                time.sleep(0.05)
            text = store.get(f"{self._key}/text").decode()
            time.sleep(LINGER)
            return text
        while store.add(f"{self._key}/answers", 0) < self.rank.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        answers = {}
        for rank in range(self.rank.world_size):
            if store.check([f"{self._key}/{rank}"]):
                answers[rank] = json.loads(store.get(f"{self._key}/{rank}"))
            else:
                host = store.get(f"{self._key}/host/{rank}").decode()
                answers[rank] = {"host": host, "at": "", "in": "", "silent": True}
        text = message(self.rank.rank, answers, self.limit)
        _say(text)
        store.set(f"{self._key}/text", text)
        time.sleep(LINGER)  # rank 0 has the store
        return text

    def _answer(self, stack: Stack, timed_out: bool) -> dict[str, Any]:
        """Where this rank is."""
        part = next((PARTS[name] for _, _, name in stack if name in PARTS), "")
        if any("/torch/optim/" in file for file, *_ in stack):
            part = "optimizer"
        step = "before the first step" if self.clock.step is None else f"step {self.clock.step}"
        own = [frame for frame in stack if not OTHERS.search(frame[0])] or stack
        file, line, name = own[-1] if own else ("?", 0, "?")
        place = f"{'/'.join(file.split('/')[-3:])}:{line} in {name}"
        entry = oldest_collective() or (self._waits_in if timed_out else None)
        waits = in_words(entry) if entry else ""
        if not waits and (timed_out or (stack and "/torch/distributed/" in stack[-1][0])):
            called = next((name for file, _, name in stack if file.endswith("/distributed_c10d.py")), stack[-1][2])
            waits = "a send or receive" if "p2p" in called else called
        return {"host": socket.gethostname(), "at": ", ".join(filter(None, (step, part))), "in": waits, "line": place}


def message(first: int, answers: dict[int, dict[str, Any]], limit: float) -> str:
    """What all ranks have answered, in words: those that are to blame first.

    Args:
        first: the rank that has timed out first. answers: by rank.
    """
    missed = answers[first]["in"]
    late = [rank for rank, answer in answers.items() if not answer["in"]]
    late = late or [rank for rank, answer in answers.items() if answer["in"] != missed]
    hosts = [answers[rank]["host"] for rank in sorted(answers)]
    if late:
        who = f"{name_ranks(late)} on {name_hosts([hosts[rank] for rank in late])} did not come to {missed}"
    else:
        who = f"all ranks are in {missed}, which did not end"
    lines = [f"hang: {who} within {limit:g} s (--timeout)"]
    groups: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        waits = f", waiting in {answer['in']}" if answer["in"] else ""
        text = f"{answer['at']}{waits}, at {answer.get('line')}"
        if answer.get("silent"):
            text = "no answer: it is stopped or gone, or its main thread keeps Python from running others"
        groups.setdefault(text, []).append(rank)
    for text, ranks in sorted(groups.items(), key=lambda item: (item[1][0] not in late, item[1][0])):
        lines.append(f"  {name_ranks(ranks)} ({name_hosts([hosts[rank] for rank in ranks])}): {text}")
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
    ranks = next((dist.get_process_group_ranks(group) for group, own in group_names().items() if own == name), [])
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    axis = "the world" if description == "default_pg" else description.removeprefix("mesh_") or name
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    shapes = [f"{tuple(sizes)} {kind}" for sizes, kind in tensors][:4]
    which = [f"number {number} of {axis}", *([name_ranks(ranks)] if ranks else []), *shapes]
    return f"{entry['profiling_name'].partition(':')[2]} ({', '.join(which)})"


def _say(text: str) -> None:
    if not report("exit", f"{text}\n", 1):
        print(text, file=sys.stderr, flush=True)


def _age(entry: dict[str, Any]) -> float:
    return time.time() - entry["time_created_ns"] / 1e9


def _stack(frame: FrameType | None) -> Stack:
    return [(outer.f_code.co_filename, line, outer.f_code.co_name) for outer, line in walk_stack(frame)][::-1]


def _all_of(error: BaseException) -> tuple[str, Stack]:
    """What an error says and where, with what has caused it: pipelines wrap errors."""
    text, stack = "", list[tuple[str, int, str]]()
    cause: BaseException | None = error
    while cause is not None:
        text += f"{cause}\n"
        for frame, line in walk_tb(cause.__traceback__):
            stack.append((frame.f_code.co_filename, line, frame.f_code.co_name))
        cause = cause.__cause__
    return text, stack
