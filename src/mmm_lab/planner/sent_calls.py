"""Records what a rank passes to process groups, in its order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from mmm.parallel.collective_bytes import Call
from mmm.traffic.count import Traffic

# Packages whose lines say nothing of where a program calls a collective; ours come second.
OTHERS = ("torch", "mmm_lab", "contextlib", "functools")
OURS = "mmm"


@dataclass(frozen=True)
class SentCall:
    """A call to a process group.

    Attributes:
        phase: the phase of the run in which it was made, as `StepClock.phase` says it.
        axis: the mesh axis that the group lies on.
        doing: ``forward``, ``backward`` or ``optimizer``, as `MemoryTracker.doing` says it.
        line: the line of the program, such as ``train.py:31``.
    """

    phase: str
    axis: str
    call: Call
    doing: str = ""
    line: str = ""


class SentInOrder(Traffic):
    """Counts traffic, as `Traffic` does, and also keeps each call.

    Attributes:
        calls: the calls whose bytes are counted.
        all: the calls, and also the barriers and the objects gathered, whose bytes are not.
    """

    def __init__(self, phase: Callable[[], str], doing: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.phase = phase
        self.doing = doing
        self.calls: list[SentCall] = []
        self.all: list[SentCall] = []

    def add(self, axis: str, call: Call) -> None:
        super().add(axis, call)
        sent = SentCall(self.phase(), axis, call, self.doing(), line_of_program())
        self.calls.append(sent)
        self.all.append(sent)

    def add_uncounted(self, axis: str, call: Call) -> None:
        self.all.append(SentCall(self.phase(), axis, call, self.doing(), line_of_program()))


def line_of_program() -> str:
    """The innermost line that is neither PyTorch's nor ours; of a program of ours, the innermost of `mmm`."""
    ours = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package, _, rest = module.partition(".")
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if package == OURS and not rest.startswith("traffic"):
            ours = ours or line
        elif package not in (OURS, *OTHERS):
            return line
        frame = frame.f_back
    return ours
