"""What one rank does in a profile, by its own clock: slices of time on tracks; and its calls to process groups.

A call is seen where PyTorch's dispatcher goes to a backend (the key ``BackendSelect``), whether Python, a functional
collective or DDP's C++ makes it. Other operators take their usual way and cost nothing more, unlike under the dispatch
mode of `mmm.traffic.count`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mmm.torch_private.operators import (
    call_backend,
    end_library,
    keys_below_backend_select,
    operators_of,
    schema_arguments,
)
from mmm.traffic.collective_bytes import Call
from mmm.traffic.operators import READERS, operator_name

STEPS, CALLS = "steps", "communication"  # names of tracks
WAIT = "_c10d_functional::wait_tensor"


class Slice(NamedTuple):
    """Something that took time.

    Attributes:
        kind: of a step's part ``dtd``, …; ``collective``, ``send``, ``recv`` or ``wait``.
        begin, end: nanoseconds since 1970, by this rank's clock.
        key: what the slices that belong together have in common, on all ranks; "" of one that is alone.
        ranks: that have one with this key. sends: to the others, rather than meeting them.
    """

    track: str
    kind: str
    name: str
    begin: int
    end: int
    key: str = ""
    ranks: tuple[int, ...] = ()
    sends: bool = False


@dataclass
class RankTrace:
    """Attributes:
    label: for people, of the rank. slices: of tracks of our own.
    events: PyTorch's, as in its chrome traces. base: ns since 1970 at which its µs begin.
    offset: ns to add to this rank's clock for rank 0's. error: ns by which it may be wrong.
    """

    rank: int
    label: str
    slices: list[Slice] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    base: int = 0
    offset: int = 0
    error: int = 0


class CallRecorder:
    """Notes the calls to process groups in a ``with`` block, and the waiting for them. All ranks begin it at the same
    place of the program: calls are matched by their order in a group.

    Args:
        axes: by the ranks of a group, its name (`mmm.traffic.operators.axes_of`).

    Attributes:
        slices: in the order in which they end.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str]) -> None:
        self.axes, self.slices = axes, list[Slice]()
        self._numbers: Counter[tuple[Any, ...]] = Counter()
        self._pending: dict[int, tuple[Any, Slice]] = {}  # by the identity of a P2P's Work, kept so that it stays one
        self._stack = ExitStack()

    def __enter__(self) -> CallRecorder:
        with ExitStack() as stack:  # undone where it fails
            libraries = {name: torch.library.Library(name, "IMPL") for name in ("c10d", WAIT.partition("::")[0])}
            for library in libraries.values():
                stack.callback(end_library, library)
            for operator in operators_of(*libraries):
                if operator.namespace != "c10d" and operator.name() != WAIT:
                    continue
                arguments = {argument.name for argument in schema_arguments(operator)}
                if operator.name() == WAIT or "process_group" in arguments:
                    name = operator.name().partition("::")[2]
                    libraries[operator.namespace].impl(name, self._noting(operator), "BackendSelect", with_keyset=True)
            plain = dist.Work.wait

            def wait(work: Any, *args: Any) -> Any:
                begin = time_ns()
                result = plain(work, *args)
                self._waited(begin, self._pending.pop(id(work), (None, None))[1])
                return result

            stack.callback(setattr, dist.Work, "wait", plain)
            dist.Work.wait = wait  # type: ignore[method-assign, assignment]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.slices += [call for _, call in self._pending.values() if not call.sends]  # for which nobody has waited
        self._pending.clear()

    def _noting(self, operator: Any) -> Any:
        below = keys_below_backend_select()
        names = [argument.name for argument in schema_arguments(operator)]

        def call(keys: Any, *args: Any, **named: Any) -> Any:
            begin = time_ns()
            result = call_backend(operator, keys & below, *args, **named)
            if "process_group" not in names:
                self._waited(begin)
            else:
                self._called(operator, dict(zip(names, args, strict=False)) | named, begin, time_ns(), result)
            return result

        return call

    def _waited(self, begin: int, call: Slice | None = None) -> None:
        end, name, key, ranks = time_ns(), "wait", "", tuple[int, ...]()
        if call is not None:
            name = f"wait: {call.name}"
            if not call.sends:  # it is received when the wait ends
                key, ranks = call.key, call.ranks
                self.slices.append(call._replace(key="", ranks=()))
        self.slices.append(Slice(_track(), "wait", name, begin, end, key, ranks))

    def _called(self, operator: Any, arguments: Mapping[str, Any], begin: int, end: int, result: Any) -> None:
        plain = operator_name(operator)
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        read = READERS.get(plain)  # one that sends in a way that the package does not know is named as it is
        (call,) = read(arguments, group.size(), group.rank()) if read else [Call(plain, group.size(), group.rank(), 0)]
        operation = {"receive": "recv"}.get(call.operation, call.operation)
        axis = self.axes.get(tuple(sorted(ranks)), "world" if len(ranks) == dist.get_world_size() else "")
        name, size = f"{operation} {axis}".strip(), f", {call.payload / 1e6:.3g} MB"
        if operation not in ("send", "recv"):
            call_index = self._number(group.group_name)
            key = f"{group.group_name} {call_index} {operation}"
            self.slices.append(Slice(_track(), "collective", f"{name}{size}", begin, end, key, tuple(sorted(ranks))))
            return
        sends, key, way, text = operation == "send", "", tuple[int, ...](), "recv from any"
        if plain != "recv_any_source":
            own, other = dist.get_rank(), ranks[arguments["dst" if sends else "src"]]
            way, tag = (own, other) if sends else (other, own), arguments.get("tag", 0)
            key = f"{group.group_name} {way} {tag} {self._number(group.group_name, way, tag)}"
            text = f"send to {other}" if sends else f"recv from {other}"
        noted = Slice(_track(), operation, f"{text}{size}", begin, end, key, way, sends)
        if sends:
            self.slices.append(noted)
        work = dist.Work.unbox(result)  # type: ignore[attr-defined]
        self._pending[id(work)] = work, noted

    def _number(self, *of: Any) -> int:
        self._numbers[of] += 1
        return self._numbers[of]


def _track() -> str:
    """Of this thread: slices of one thread lie in each other, or apart."""
    thread = threading.current_thread()
    return CALLS if thread is threading.main_thread() else f"{CALLS}, {thread.name}"
