"""A folder in this host's memory that outlives its ranks: for copies of a run's state (`mmm.checkpoint.replica`).

Launch, or an elastic run's agent, makes it, and removes it in the end. If that process is killed, its fork server does.
If both are, the next one on this host: nobody holds the folder's lock.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from mmm.contract import MEMORY_VARIABLE
from mmm.outside import open_own

TMPFS = Path("/dev/shm")
PREFIX = "mmm-memory-"


@contextlib.contextmanager
def host_memory(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Within it MEMORY_VARIABLE tells the ranks the folder's path; where the system has no such memory, nothing."""
    environ.pop(MEMORY_VARIABLE, None)
    if not os.access(TMPFS, os.W_OK):
        yield
        return
    prefix = f"{PREFIX}{os.getuid()}-"
    for left in TMPFS.glob(f"{prefix}*"):
        _remove_unlocked(left)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=TMPFS))
    lock = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = made.rename(made.with_name(made.name.removeprefix(".")))  # seen by others once it is locked
        environ[MEMORY_VARIABLE] = str(path)
        yield
    finally:
        remove(environ)
        os.close(lock)


def remove(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove this process's folder, if it has one. No rank lives by now."""
    if path := environ.pop(MEMORY_VARIABLE, ""):
        shutil.rmtree(path, ignore_errors=True)


def _remove_unlocked(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's, or removed meanwhile
        lock = open_own(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
