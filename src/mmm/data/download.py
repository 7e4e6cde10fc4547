"""Fetch a data set once, completely or not at all, however many processes ask for it.

A file lock lets one process through at a time. It fetches into a temporary folder, checks every file's hash, and
renames the folder in one step: a folder with the final name is complete, also where locks do not reach other hosts or a
process is killed half-way. Neither torchvision's downloads nor pooch limit the wait for a server's
answer, which a compute node without a network needs, or share one failure among the ranks of a host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mmm.errors import DataError
from mmm.outside import Lock, lock, parse_json, printable, read_file
from mmm.runtime.ranks import Rank

ANSWER_SECONDS = 10.0  # for any server to begin to answer, all mirrors together
STALL_SECONDS = 20.0  # without a byte, once it has begun
WAIT_SECONDS = 900.0  # for another process that is downloading


class Refused(Exception):
    """Why the data cannot be downloaded here. Not the user's mistake: another data set may replace it."""


@dataclass(frozen=True)
class File:
    """A file to fetch: its name in the cache, its sha256 in hexadecimal, its size in bytes, and where it is offered,
    best first."""

    name: str
    sha256: str
    size: int
    urls: tuple[str, ...]


def cache_folder() -> Path:
    """``$MMM_DATA``, or else ``mmm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if given := os.environ.get("MMM_DATA"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mmm"


def obtain(folder: Path, files: tuple[File, ...], ranks: Rank | None = None) -> None:
    """Make `folder` with these files in it, unless another process already has.

    Args:
        folder: in a cache; it is there with all files when this returns.
        ranks: where given, the ranks of this host share a refusal that one of them met, instead of each trying again.

    Raises:
        Refused: no server answers, an answer is not the file wanted, or the cache cannot be written to.
        DataError: another process holds the lock for longer than ``WAIT_SECONDS``.
    """
    asked = time.time()
    refusal = folder.with_name(f".{folder.name}.refused")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")) as locked:
            if folder.is_dir():
                return
            if reason := _already_refused(refusal, ranks, asked):
                raise Refused(reason)
            _sweep(folder, locked)
            try:
                _fetch_all(folder, files)
            except Refused as refused:
                note = {"run": _run(), "time": time.time(), "reason": str(refused)}
                with contextlib.suppress(OSError):
                    _write(refusal, json.dumps(note))
                raise
            refusal.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"{folder.parent} cannot be written to ({error.strerror or error})") from None


# --- one at a time --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock, which the system releases when a process ends. False without locks: the rename alone protects.

    filelock replaces a missing flock (Lustre) by a marker file, which a killed job would leave in the next one's way.
    """
    # The cache may be shared: what somebody has put there as a link is not followed, and no FIFO is waited for.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with open(descriptor, "rb+", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is no file")
        deadline = time.monotonic() + WAIT_SECONDS
        answer = lock(file.fileno())
        while answer is Lock.TAKEN:
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has been downloading for {WAIT_SECONDS:.0f} s and still holds "
                    f"{path}: end it, or give the files with --data_dir"
                )
            time.sleep(0.05)
            answer = lock(file.fileno())
        yield answer is Lock.LOCKED


def _write(path: Path, text: str) -> None:
    """Put it in the place of whatever is there, through no link."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f"{path.name}.", delete=False
    ) as file:
        file.write(text)
    os.replace(file.name, path)


def _run() -> str:
    """An identifier of the run on this host, by the process that started its ranks."""
    return f"{socket.gethostname()}:{os.getppid()}"


def _already_refused(refusal: Path, ranks: Rank | None, asked: float) -> str:
    """Why the download failed just now, for another rank of this run or while this process waited; else empty."""
    try:
        note = parse_json(read_file(refusal, 4096))
        age, reason, run = time.time() - note["time"], printable(str(note["reason"])), note["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    of_this_run = ranks is not None and ranks.local_world_size != 1 and run == _run() and 0 <= age < 600
    return reason if of_this_run or note["time"] >= asked else ""


def _sweep(folder: Path, locked: bool) -> None:
    """Remove what killed downloads left: this host's, of which none goes on where we hold its lock; or a day old."""
    for left in folder.parent.glob(f".{folder.name}.part.*"):
        host = left.name.removeprefix(f".{folder.name}.part.").rpartition(".")[0]
        with contextlib.suppress(OSError):
            if (locked and host == socket.gethostname()) or time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


# --- fetching -------------------------------------------------------------------------------------------------------


def _fetch_all(folder: Path, files: tuple[File, ...]) -> None:
    """Fetch all files into a temporary folder, then rename it."""
    prefix = f".{folder.name}.part.{socket.gethostname()}."
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        part.chmod(0o755)
        for file in files:
            _fetch(file, part / file.name)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another host was faster, and its folder is complete
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fetch(file: File, path: Path) -> None:
    """From the first address that gives the right bytes.

    Raises:
        Refused: none does. OSError: the file cannot be written.
    """
    reasons, patience = [], ANSWER_SECONDS
    for url in file.urls:
        digest, size, asked = hashlib.sha256(), 0, time.monotonic()
        try:
            try:
                answer = _open(url, patience)
            finally:
                patience -= time.monotonic() - asked
            with answer, path.open("wb") as out:
                while size <= file.size and (chunk := answer.read(1 << 18)):
                    size += len(chunk)
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            if size == file.size and digest.hexdigest() == file.sha256:
                return
            found = f"{size} bytes of sha256 {digest.hexdigest()}" if size <= file.size else "more"
            reasons.append(f"{url}: {found}, not {file.size} of {file.sha256}")
        except _FETCH_ERRORS as error:
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            reason = getattr(error, "reason", None)  # urllib wraps what the system said
            reasons.append(f"{url}: {reason if isinstance(reason, OSError) else error}")
        if patience <= 0:
            break
    raise Refused("; ".join(reasons))


_FETCH_ERRORS = (OSError, ValueError, http.client.HTTPException)  # URLError, TimeoutError and SSLError are OSErrors
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def _open(url: str, seconds: float) -> IO[bytes]:
    """The answer's body. In a thread, because looking up a host name keeps to no time limit of Python's."""
    found: list[IO[bytes] | BaseException] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "mmm"})
            found.append(urllib.request.urlopen(request, timeout=max(seconds, STALL_SECONDS)))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"no answer in {seconds:.1f} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
