"""A signal as a wish to stop once the step is over, for a run that saves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mmm.runtime.failure import first_failure

STOPPING = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Attributes: came: the first of `STOPPING` that has come; None before."""

    came: signal.Signals | None = None


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Inside, SIGTERM and SIGUSR1 only note that they have come: a scheduler sends the first some time before SIGKILL,
    and `launch --signal USR1@60` the second.

    Where launch ends the ranks because one has failed, SIGTERM does what it did before: no other step can be made.
    """
    wish, before = StopSignal(), dict[int, Any]()

    def note(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGTERM or not first_failure():
            wish.came = wish.came or signal.Signals(number)
        elif callable(before[number]):
            before[number](number, frame)
        elif before[number] == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        before.update({number: signal.signal(number, note) for number in STOPPING})
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
