"""Finds what is left of a run's processes, and ends it.

psutil would find it as well, and is a compiled dependency more.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from mmm_launch.contract import MARKER_VARIABLE

PROC = Path("/proc")
# Seconds. A process in an uninterruptible system call dies only when that call returns.
KILL_TIMEOUT = 2.0


def of_run(session: int, marker: str) -> list[int]:
    """Living processes of a run, this one excepted: those of its session, and those that left it but have its marker.

    Empty where there is no /proc.
    """
    found = []
    wanted = f"{MARKER_VARIABLE}={marker}".encode()
    try:
        names = os.listdir(PROC)
    except OSError:
        return []
    for name in names:
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, _, _, its_session, *_ = (PROC / name / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX" and (
                    int(its_session) == session or wanted in (PROC / name / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(name))
    return found


def end(session: int, marker: str, grace: float) -> None:
    """End what is left of a run: SIGTERM, `grace` seconds to follow it, SIGKILL."""
    left = of_run(session, marker)
    if left and grace > 0:
        send(left, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while left and time.monotonic() < deadline:
            time.sleep(0.01)
            left = of_run(session, marker)
    deadline = time.monotonic() + KILL_TIMEOUT
    # Repeat until none is left: a process may have forked between the listing and the signal.
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.005)
        left = of_run(session, marker)


def send(pids: Iterable[int], number: int) -> None:
    """A signal to those of the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
