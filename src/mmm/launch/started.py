"""When a start-up began: what the environment says, and what the system knows of a process."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mmm.errors import LaunchError
from mmm.launch.wire import BEGAN_VARIABLE, STARTED_VARIABLE

PROC = Path("/proc")
AHEAD = 3600.0  # s by which another host's clock may be ahead


def process_start(name: str = "self") -> float | None:
    """When a process was started, in seconds since 1970, to a hundredth; None where there is no /proc.

    It is the time of the shell's fork: earlier than anything that the process's own code could note.
    """
    try:
        ticks = int((PROC / name / "stat").read_text().rpartition(")")[2].split()[19])  # since boot
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def started(environ: Mapping[str, str], otherwise: float) -> tuple[float, str]:
    """When the start-up of this process began, and who says so: ``MMM_STARTED_AT``, ``launch`` or ``process``.

    Args:
        otherwise: the time to take where neither the environment nor the system has one.

    Raises:
        LaunchError: a variable's value is not a time.
    """
    for name, source in ((STARTED_VARIABLE, STARTED_VARIABLE), (BEGAN_VARIABLE, "launch")):
        if environ.get(name):
            return _time(name, environ[name]), source
    return process_start() or otherwise, "process"


def variables(environ: Mapping[str, str], otherwise: float) -> dict[str, str]:
    """What `launch` tells its ranks of when it was started, and the job. Raises `LaunchError` as `started` does."""
    told = {name: environ[name] for name in (STARTED_VARIABLE,) if environ.get(name)}
    told[BEGAN_VARIABLE] = repr(process_start() or otherwise)
    started(told, otherwise)
    return told


def _time(name: str, text: str) -> float:
    try:
        at = float(text)
    except ValueError:
        at = float("nan")
    if not 0 < at < time.time() + AHEAD:
        raise LaunchError(
            f"{name}={text} in the environment is not a time in the past, in seconds since 1970: set it "
            f"with `export {name}=$(date +%s.%N)`, or unset it"
        )
    return at
