"""The folder of downloaded data sets. Each is downloaded once per host, completely or not at all."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from mmm.errors import DataError
from mmm.outside import Lock, lock, printable

# The longest that a server may take for one answer.
ANSWER_SECONDS = 10.0
# The longest that this process waits for another one that downloads.
WAIT_SECONDS = 900.0


class Refused(Exception):
    """The data cannot be downloaded here. It is not the user's mistake: another data set may replace it."""


def cache_folder() -> Path:
    """``$MMM_DATA`` or, if it is not set, ``mmm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("MMM_DATA")
    if own:
        return Path(own).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "mmm"


def download_once(folder: Path, download: Callable[[Path], object]) -> None:
    """Make `folder` by a download, unless it exists.

    One process of a host downloads at a time, into a folder next to it that gets the final name at the end. So a folder
    of that name is complete, even if a process is killed or a lock does not reach other hosts.

    Args:
        download: writes all files into the folder that it is given, and checks their hashes.

    Raises:
        Refused: the download failed here, or failed in another process while this one waited for it.
        DataError: another process holds the lock for longer than ``WAIT_SECONDS``.
    """
    if os.path.isdir(folder):
        return
    asked_at = time.time()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock_path = folder.with_name(f".{folder.name}.lock")
        with _locked(lock_path) as note:
            # Another process may have downloaded it while this one waited for the lock.
            if os.path.isdir(folder):
                return
            failure = note.read(4096).decode(errors="replace")
            failed_at = os.fstat(note.fileno()).st_mtime
            if failure and failed_at >= asked_at:
                raise Refused(printable(failure))
            try:
                _download(folder, download)
            except Refused as refused:
                # Processes that wait for the lock read this, instead of waiting for the same servers in turn.
                note.seek(0)
                note.truncate()
                note.write(str(refused).encode())
                raise
    except OSError as error:
        raise Refused(f"{folder.parent} cannot be written to ({error.strerror or error})") from None


def _download(folder: Path, download: Callable[[Path], object]) -> None:
    # The host's name: where a shared file system has no locks, two hosts may download at once.
    partial = folder.with_name(f".{folder.name}.part.{socket.gethostname()}")
    # A killed download may have left one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)
    try:
        # Hides torchvision's progress bars.
        with contextlib.redirect_stderr(io.StringIO()):
            download(partial)
    except (OSError, RuntimeError, ValueError, EOFError, http.client.HTTPException) as error:
        one_line = " ".join(str(error).split())
        raise Refused(one_line or type(error).__name__) from None
    else:
        try:
            partial.rename(folder)
        except OSError:
            # Another host may have been faster.
            if not os.path.isdir(folder):
                raise
    finally:
        socket.setdefaulttimeout(timeout_before)
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Hold the lock of a file, which the system releases when a process ends.

    Where the file system has no locks, nobody waits: a folder is still complete, because it is renamed at the end.
    """
    # The cache may be shared with others: do not follow a link that somebody put there, and do not wait for a FIFO.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    with open(descriptor, "rb+", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is not a file")
        deadline = time.monotonic() + WAIT_SECONDS
        while lock(descriptor) is Lock.TAKEN:
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has been downloading for {WAIT_SECONDS:.0f} s and still holds {path}: "
                    f"end it, or give the files with --data_dir"
                )
            time.sleep(0.05)
        yield file
