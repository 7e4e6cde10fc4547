"""Whether the run that writes a journal is still alive: by the file's lock; without locks, by the file's age and the
process."""

import enum
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECENT = 15 * 60.0  # s without a write after which a run without lock and process counts as over


class Lock(enum.Enum):
    """The result of asking for a file's lock."""

    LOCKED = "held by us"
    TAKEN = "held by another"
    NONE = "the file system has no locks"


def lock(fd: int) -> Lock:
    """Take the file's advisory lock, if it is free. Closing `fd` releases it."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except (ImportError, OSError):  # ENOLCK, ENOSYS, EOPNOTSUPP, …
        return Lock.NONE
    return Lock.LOCKED


def this_process() -> dict[str, Any]:
    """What a journal's header says of its writer."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": process_began(os.getpid())}


def process_began(pid: int) -> str | None:
    """When a process of this host began, as text that identifies it among processes with that pid; None without one.

    Empty where the system has no /proc: then only the pid is known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "" if pid_exists(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"


def pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def lives_here(writer: Mapping[str, Any]) -> bool:
    """Whether that process (`this_process` of it) is on this host and still there."""
    pid, began = writer.get("pid"), writer.get("began")
    if writer.get("host") != socket.gethostname() or type(pid) is not int or began is None:
        return False
    return process_began(pid) == began


def why_going_on(fd: int, writer: Mapping[str, Any]) -> str | None:
    """Why the run whose journal is open as `fd` counts as running; None: it is over.

    Takes the lock where it is free: close `fd` to release it.

    Args:
        writer: what the journal's header says of its process, and whether that process found locks (``locks``); may be
            empty.
    """
    found = lock(fd)
    if found is Lock.TAKEN:
        return "another process holds its journal's lock"
    if found is Lock.LOCKED and writer.get("locks", True):
        return None
    without = "this file system has no locks" if found is Lock.NONE else "the run has found no locks where it writes"
    if lives_here(writer):
        return f"{without}, and process {writer['pid']} on this host, which writes the journal, is alive"
    age = time.time() - os.fstat(fd).st_mtime
    if age < RECENT:
        where = f" by process {writer['pid']} on {writer['host']}" if {"pid", "host"} <= writer.keys() else ""
        return (
            f"{without}, and the journal was written {max(age, 0):.0f} s ago{where}: "
            f"only after {RECENT / 60:.0f} minutes without a write does the run count as over"
        )
    return None
