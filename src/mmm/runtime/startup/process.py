"""What this process has noted of its own start: when the program began, and how long imports took."""

from __future__ import annotations

import os
import sys
import time

from mmm.launch import started as launch_started
from mmm.runtime.startup.imports import ImportTimer

MEASURED = ("mmm.examples", "mmm.trainer")  # rooms whose programs measure their start; in others no timer stays on

timer = ImportTimer()
shared: dict[str, float] = {}  # package: seconds, of the process that this one was forked from
_loaded = time.time()  # for systems that do not say when a process was started
_began: float | None = None


def time_imports() -> None:
    """From here on imports are timed, in this process and those it forks, up to `ready`."""
    timer.start()


def keep_shared() -> None:
    """In the process that ranks are forked from: what was imported so far is theirs in common. Not timed further."""
    global shared, _began
    timer.stop()
    shared, timer.seconds, _began = timer.seconds, {}, None


def begin(first: bool = True) -> None:
    """The program begins. `first`: this is its very beginning; else it is, unless an earlier call has been made."""
    global _began
    if first or _began is None:
        _began = time.time()
    if not first or any(name in sys.modules for name in MEASURED):
        timer.start()


def began() -> float:
    """When the program began; where nothing has said so, when the first of these modules was loaded."""
    return _loaded if _began is None else _began


def started() -> tuple[float, str]:
    """When the start-up began, and who says so. Raises `LaunchError` where a variable's value is not a time."""
    return launch_started.started(os.environ, _loaded)
