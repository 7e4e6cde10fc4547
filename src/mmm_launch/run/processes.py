"""Finds the processes that are left of a run, and ends them.

psutil would find them as well, but would be one more compiled dependency.
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
    """Return the pids of a run's living processes, without this one.

    Args:
        session: number of the session of its fork server.
        marker: value of MARKER_VARIABLE in the run's environment: it finds processes that have left the session.

    Returns:
        The pids; none where there is no /proc.
    """
    pids = []
    wanted = f"{MARKER_VARIABLE}={marker}".encode()
    try:
        names = os.listdir(PROC)
    except OSError:
        return []
    for name in names:
        if name.isdigit() and int(name) != os.getpid():
            # A process may end while its files are read. Those of other users cannot be read.
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name in parentheses may contain spaces and parentheses itself: read what follows it.
                status = (PROC / name / "stat").read_text().rpartition(")")[2]
                state, _, _, its_session, *_ = status.split()
                # Zombies (Z) and dead processes (X) need no signal.
                if state in "ZX":
                    continue
                if int(its_session) == session or wanted in (PROC / name / "environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids


def end(session: int, marker: str, grace: float) -> None:
    """End the processes that are left of a run: first SIGTERM, then after `grace` seconds SIGKILL."""
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


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
