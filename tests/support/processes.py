"""Processes that write their number to a file each: wait for them, and see whether they still run."""

import time
from pathlib import Path


def wait_for(folder: Path, files: int) -> None:
    """Until so many files there have been written."""
    deadline = time.monotonic() + 100
    while sum(bool(path.read_text()) for path in folder.iterdir()) < files:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(folder: Path) -> list[str]:
    """Those of the files there whose process runs."""
    return [path.name for path in folder.iterdir() if runs(int(path.read_text()))]


def wait_for_ends(folder: Path) -> None:
    """Until none of them runs."""
    deadline = time.monotonic() + 20
    while left := running(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def leave_as_killed(history) -> None:
    """Let go of a record's journal as the system does for a process that is gone: its end is not written."""
    history._journal.close()
