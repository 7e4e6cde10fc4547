"""A signal as a wish to stop once the step is over, for a run that saves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mmm.runtime.contract import REPEAT, attached, first_failure, report
from mmm.runtime.failure import rank

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = b"\nCtrl-C: the run ends after the next step, and is saved; Ctrl-C again ends it at once\n"


class StopSignal:
    """Attributes: came: the first of `STOPPING` that has come; None before."""

    came: signal.Signals | None = None


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Inside, SIGINT, SIGTERM and SIGUSR1 only note that they have come: Ctrl-C sends the first, a scheduler the second
    some time before SIGKILL, or `timeout --signal USR1` the third.

    A second SIGINT does what the first did before. So does SIGTERM where launch ends the ranks because one has failed:
    no other step can be made. A SIGINT that is ignored (a script's `program &`) stays so.
    """
    wish, before, owner = StopSignal(), dict[int, Any](), os.getpid()
    interrupted: float | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        again = False
        if number == signal.SIGINT and interrupted is not None:
            again = time.monotonic() - interrupted > REPEAT
        elif number == signal.SIGINT:
            interrupted = time.monotonic()
            if rank() == 0 and not attached() and os.getpid() == owner:  # launch says it; data loaders inherit this
                os.write(2, INTERRUPTED)  # print may be what the signal has come into
        if not again and (number == signal.SIGUSR1 or not first_failure()):
            wish.came = wish.came or signal.Signals(number)
        elif callable(before[number]):
            before[number](number, frame)
        elif before[number] == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        for stopping in STOPPING:
            if stopping != signal.SIGINT or signal.getsignal(stopping) != signal.SIG_IGN:
                before[stopping] = signal.signal(stopping, note)
        report("saves", "", 0)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            late = number == signal.SIGUSR1 and handler == signal.SIG_DFL  # to a run that is over, and would be killed
            signal.signal(number, signal.SIG_IGN if late else handler)
