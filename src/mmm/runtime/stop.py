"""Lets a signal end a run that saves only once its step is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mmm.runtime.failure import rank
from mmm_launch.contract import REPEAT, attached, first_failure, report

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = b"\nCtrl-C: the run ends after the next step, and is saved; Ctrl-C again ends it at once\n"


class StopSignal:
    """Tells whether a signal has asked the run to stop.

    Attributes:
        came: the first of `STOPPING` that this process has received; None before.
    """

    came: signal.Signals | None = None


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Inside, SIGINT, SIGTERM and SIGUSR1 do not end the process: they are noted in the `StopSignal` that it yields.

    Ctrl-C sends the first, a scheduler sends the second some time before SIGKILL, and `timeout --signal USR1` the
    third.

    A second SIGINT does what the first would have done before. So does SIGTERM if launch ends the ranks because one has
    failed: then no other step can be made. A SIGINT that is ignored (a script's `program &`) stays ignored.
    """
    wish = StopSignal()
    before: dict[int, Any] = {}
    owner = os.getpid()
    interrupted: float | None = None

    def note(signal_number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        again = False
        if signal_number == signal.SIGINT:
            if interrupted is None:
                interrupted = time.monotonic()
                # Under launch, launch prints it. The processes of data loaders inherit this handler, but are silent.
                if rank() == 0 and not attached() and os.getpid() == owner:
                    # Not `print`: the signal may have interrupted a print, which cannot be entered twice.
                    os.write(2, INTERRUPTED)
            else:
                again = time.monotonic() - interrupted > REPEAT
        if not again and (signal_number == signal.SIGUSR1 or not first_failure()):
            wish.came = wish.came or signal.Signals(signal_number)
        elif callable(before[signal_number]):
            before[signal_number](signal_number, frame)
        elif before[signal_number] == signal.SIG_DFL:
            signal.signal(signal_number, signal.SIG_DFL)
            os.kill(os.getpid(), signal_number)

    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
        for stopping in STOPPING:
            if stopping != signal.SIGINT or signal.getsignal(stopping) != signal.SIG_IGN:
                before[stopping] = signal.signal(stopping, note)
        report("saves", "", 0)
    try:
        yield wish
    finally:
        for changed, handler in before.items():
            if changed == signal.SIGUSR1 and handler == signal.SIG_DFL:
                # One that comes late, when the run is over, would kill the process.
                handler = signal.SIG_IGN
            signal.signal(changed, handler)
