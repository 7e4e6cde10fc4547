"""The folder of downloaded data sets. Each is downloaded once a host, completely or not at all."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from mmm.errors import DataError
from mmm.outside import Lock, lock, printable

ANSWER_SECONDS = 10.0  # that a server may take for each answer
DOWNLOAD_SECONDS = 600.0  # for all of a download: a server may answer in time, and send a byte each time
WAIT_SECONDS = 900.0  # for another process that downloads


class Refused(Exception):
    """Why the data cannot be downloaded here. Not the user's mistake: another data set may replace it."""


def cache_folder() -> Path:
    """``$MMM_DATA``, or else ``mmm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get("MMM_DATA")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mmm"


def download_once(folder: Path, download: Callable[[Path], object]) -> None:
    """Make `folder` by a download, unless it is there.

    One process of a host downloads at a time, into a folder beside it that gets the final name at the end. So a folder
    of that name is complete, even where a process is killed, or where a lock does not reach other hosts.

    Args:
        download: writes all files into the folder that it is given, and checks their hashes.

    Raises:
        Refused: the download failed here, or failed in another process while this one waited for it.
        DataError: another process holds the lock for longer than ``WAIT_SECONDS``.
    """
    if os.path.isdir(folder):
        return
    asked = time.time()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")) as note:
            if os.path.isdir(folder):
                return
            failure = note.read(4096).decode(errors="replace")
            if failure and os.fstat(note.fileno()).st_mtime >= asked:
                raise Refused(printable(failure))
            try:
                _download(folder, download)
            except Refused as refused:
                # For the processes that wait for the lock: each of them would try, and wait for the same servers.
                note.seek(0)
                note.truncate()
                note.write(str(refused).encode())
                raise
    except OSError as error:
        raise Refused(f"{folder.parent} cannot be written to ({error.strerror or error})") from None


def _download(folder: Path, download: Callable[[Path], object]) -> None:
    partial = folder.with_name(f".{folder.name}.part.{socket.gethostname()}")
    shutil.rmtree(partial, ignore_errors=True)  # a killed download's
    partial.mkdir()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            _download_in_time(download, partial)
    except (OSError, RuntimeError, ValueError, EOFError, http.client.HTTPException) as error:
        raise Refused(" ".join(str(error).split()) or type(error).__name__) from None
    else:
        try:
            partial.rename(folder)
        except OSError:
            # Another host may have been faster.
            if not os.path.isdir(folder):
                raise
    finally:
        socket.setdefaulttimeout(before)
        shutil.rmtree(partial, ignore_errors=True)


def _download_in_time(download: Callable[[Path], object], partial: Path) -> None:
    """Download in a thread, which nobody waits for after `DOWNLOAD_SECONDS`. Raises Refused, or what it has raised."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            download(partial)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="mmm-download", daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if thread.is_alive():
        raise Refused(f"the download has not ended after {DOWNLOAD_SECONDS:g} s")
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Hold the lock of a file, which the system releases when a process ends.

    Where the file system has no locks, nobody waits: the renaming alone keeps the folder whole.
    """
    # The cache may be shared: a link that somebody has put there is not followed, and a FIFO is not waited for.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with open(descriptor, "rb+", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is no file")
        deadline = time.monotonic() + WAIT_SECONDS
        while lock(descriptor) is Lock.TAKEN:
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has been downloading for {WAIT_SECONDS:.0f} s and still holds {path}: "
                    f"end it, or give the files with --data_dir"
                )
            time.sleep(0.05)
        yield file
