"""`launch --stage`: launch writes one archive, and every host unpacks it on its own disk before its ranks start.

    launch      packed(stage)      writes one tar file in the working folder, which all hosts see, and removes it
    each host   unpack(stage)      reads it once and checks its sha256; the copy is removed when the ranks have ended

Ranks run what is in a copy, and other users of a host can guess where copies lie. So a copy lies in a folder that only
this user can write to, or is refused. The agent that has unpacked a copy holds a lock on it: a copy without a lock was
left behind by a killed run.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from mmm_launch.channel.failures import say
from mmm_launch.contract import ENDING
from mmm_launch.errors import LaunchError
from mmm_launch.files import OTHERS_WRITE, open_own
from mmm_launch.spec import stage as plan
from mmm_launch.spec.stage import Stage

# Bytes that are read or written at a time.
CHUNK = 1 << 20
# A disk that is full, or a user's share of it.
FULL = (errno.ENOSPC, errno.EDQUOT)
CHECK = "import mmm_launch.host.forkserver"
# Bytes. A larger file in bin is a program, not a script with a path in its first line.
LONGEST_SCRIPT = 1 << 20


class HashedFile:
    """A file that is read or written from its begin to its end, and the sha256 of what has passed."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def read_rest(self) -> None:
        while self.read(CHUNK):
            pass


# What launch does.


@contextlib.contextmanager
def packed(stage: Stage) -> Iterator[Stage]:
    """Makes the archive that hosts unpack, and removes it in the end. A source that is an archive is used as it is.

    Raises:
        LaunchError: the source cannot be read, or the archive cannot be written.
    """
    with ending_raises():
        if os.path.isfile(stage.source):
            archive = os.path.realpath(stage.source)
            with _errors(stage, archive), open_archive(archive) as file:
                hashed = HashedFile(file)
                hashed.read_rest()
            yield replace(stage, archive=archive, sha256=hashed.digest.hexdigest())
            return
        folder = os.getcwd()
        with _errors(stage, folder):
            descriptor, archive = tempfile.mkstemp(prefix=".mmm-stage-", suffix=".tar", dir=folder)
        try:
            with _errors(stage, folder), os.fdopen(descriptor, "wb") as file:
                sha256 = _pack(stage.source, archive, file)
            yield replace(stage, archive=archive, sha256=sha256)
        finally:
            os.unlink(archive)


def _pack(folder: str, archive: str, file: IO[bytes]) -> str:
    """Writes what is in `folder` as a tar file. Returns its sha256."""

    def choose(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # The folder may be the working folder, which contains the archive itself.
        if os.path.basename(member.name) == os.path.basename(archive):
            return None
        return member

    hashed = HashedFile(file)
    # "w|" writes a stream, so that the sha256 is known without reading the file again. GNU's format keeps hard links
    # and long names.
    with tarfile.open(fileobj=hashed, mode="w|", bufsize=CHUNK, format=tarfile.GNU_FORMAT) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=os.path.basename(folder), filter=choose)
    file.flush()
    size = os.fstat(file.fileno()).st_size
    say(f"launch: {folder} is packed ({size / 1e6:,.0f} MB)")
    return hashed.digest.hexdigest()


def _check(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Raises `LaunchError` for a kind of file that no environment has."""
    if member.isfile() or member.isdir() or member.issym() or member.islnk():
        return member
    raise LaunchError(f"{member.name} is a FIFO or a device")


# What each host does.


class Copy:
    """This host's copy of a run's environment.

    Attributes:
        folder: the folder in which the archive was unpacked.
        path: path of the environment: the only folder in `folder`, or `folder` itself if there is more in it.
        lock: descriptor of `folder`, with a lock. None: the copy was removed.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.lock: int | None = lock
        self.path = str(folder)
        inside = list(folder.iterdir())
        if len(inside) == 1 and inside[0].is_dir():
            self.path = str(inside[0])

    def remove(self) -> None:
        if self.lock is None:
            return
        # This process is ending in any case, and removing the copy is all it has left to do.
        for signum in ENDING:
            signal.signal(signum, signal.SIG_IGN)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)
        self.lock = None


def unpack(stage: Stage) -> Copy:
    """Unpacks the archive on this host's disk. Removes what killed runs have left there.

    Raises:
        LaunchError: the archive or the folder for copies is somebody else's; the archive has changed since launch read
            it, or is not one; the disk is full; or the Python in the copy cannot run ranks.
    """
    with _errors(stage, stage.to or tempfile.gettempdir()):
        parent = own_folder(stage.to)
        # Its name is known before it is there: a signal may come at any line.
        folder = parent / secrets.token_hex(8)
        lock: int | None = None
        try:
            lock = _make_locked(folder)
            with open_archive(stage.archive) as file:
                _extract(file, folder, stage.sha256)
            copy = Copy(folder, lock)
            _repoint(Path(copy.path), stage.source)
            _try_python(copy.path, stage.source)
            return copy
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            raise


def _make_locked(folder: Path) -> int:
    """Makes a folder for a copy. Returns a descriptor of it with a lock."""
    parent = folder.parent
    parent_lock = open_own(parent)
    try:
        # While the parent is locked, no other run looks for copies: the new one has no lock yet.
        fcntl.flock(parent_lock, fcntl.LOCK_EX)
        # The kernel gives a lock back when its process ends, however that ends: these are copies of killed runs.
        for path in parent.iterdir():
            if not _is_locked(path):
                shutil.rmtree(path, ignore_errors=True)
        folder.mkdir(mode=0o700)
        lock = open_own(folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent_lock)
    return lock


def own_folder(to: str | None) -> Path:
    """Makes the folder in which copies lie. Raises `LaunchError` if others can write to it, or replace it."""
    parent = Path(to or tempfile.gettempdir()) / f"mmm-stage-{os.getuid()}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(open_own(parent))
    except OSError as error:
        raise LaunchError(f"{parent}: {error.strerror} (--stage-to names another)") from None
    # Without the sticky bit, whoever can write to the folder above can rename this one and put another in its place.
    mode = parent.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise LaunchError(f"{parent.parent}: anybody can replace what is in it (--stage-to names another)")
    return parent


def open_archive(path: str) -> IO[bytes]:
    """Opens an archive that only this user or root can write to. Raises `LaunchError`, OSError."""
    # O_NONBLOCK: opening a FIFO would wait for a writer. All checks are on the open file, which nobody can exchange.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(descriptor)
    reason = ""
    if not stat.S_ISREG(info.st_mode):
        reason = "it is not a regular file"
    elif info.st_uid not in (os.geteuid(), 0):
        reason = "it belongs to somebody else (cp makes one of your own)"
    elif info.st_mode & OTHERS_WRITE:
        reason = "others can write to it (chmod go-w)"
    if reason:
        os.close(descriptor)
        raise LaunchError(f"{path}: {reason}")
    return os.fdopen(descriptor, "rb")


def _extract(archive: IO[bytes], folder: Path, sha256: str) -> None:
    """Unpacks the archive in `folder`.

    Raises:
        LaunchError: it is not the archive that launch has read, it is cut short, or it is not a tar file.
    """
    if not hasattr(tarfile, "tar_filter"):
        raise LaunchError("this Python's tarfile cannot check names: it has to be 3.10.12, 3.11.4 or newer")

    def own(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        """Check one member. Its files will belong to the user who unpacks them, even to root."""
        # tar_filter refuses names and links that lead out of the folder.
        inside = tarfile.tar_filter(_check(member), path)
        return inside.replace(uid=None, gid=None, uname=None, gname=None, deep=False)  # type: ignore[arg-type]

    hashed = HashedFile(archive)
    try:
        with tarfile.open(fileobj=hashed, mode="r|*", bufsize=CHUNK) as tar:  # type: ignore[call-overload]
            tar.extractall(folder, filter=own)
            # Two blocks of zeros end an archive. tarfile has read one of them, and does not miss the other.
            if not tar.fileobj.read(1):
                raise tarfile.ReadError("it has no end")
    except tarfile.TarError as error:
        raise LaunchError(f"the archive is cut short, or is not a tar file ({error})") from None
    hashed.read_rest()
    if hashed.digest.hexdigest() != sha256:
        raise LaunchError("the archive has changed since launch read it: its sha256 is different")


def _repoint(copy: Path, source: str) -> None:
    """Replaces the source's path by the copy's where installers write absolute paths: scripts and `.pth` files."""
    source_path = f"{source}/".encode()
    for pattern in ("bin/*", "lib/python*/site-packages/*.pth", "lib/python*/site-packages/__editable__*.py"):
        for path in copy.glob(pattern):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > LONGEST_SCRIPT:
                continue
            text = path.read_bytes()
            # A file with a zero byte is a program. Its strings have a fixed length.
            if source_path in text and b"\0" not in text:
                mode = path.stat().st_mode
                path.chmod(mode | stat.S_IWUSR)
                path.write_bytes(text.replace(source_path, f"{copy}/".encode()))
                path.chmod(mode)


def _try_python(copy: str, source: str) -> None:
    """Raises `LaunchError` unless the copied Python can run ranks."""
    python = plan.interpreter(source, copy)
    if python is None:
        return
    commands = [[python, "-c", CHECK]]
    # conda-pack leaves this program in its archives: it replaces the old paths in the unpacked files.
    conda_unpack = os.path.join(copy, "bin", "conda-unpack")
    if os.path.exists(conda_unpack):
        commands.insert(0, [python, conda_unpack])
    environ = {**os.environ, **plan.environment(os.environ, source, copy)}
    for command in commands:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/", env=environ
        )
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise LaunchError(f"the copied Python cannot start ranks ({last}): mmm has to be installed in it")


def _is_locked(path: Path) -> bool:
    """Says whether a living process uses a copy."""
    try:
        descriptor = open_own(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def _errors(stage: Stage, to: str) -> Iterator[None]:
    """Turns every error into a `LaunchError` that names the option --stage.

    Args:
        to: where is written. The system's error does not name it when the disk is full.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename:
            reason = f"{reason}: {error.filename}"
        elif error.errno in FULL:
            reason = f"{reason}: {to} has {shutil.disk_usage(to).free / 1e6:,.1f} MB left"
    except LaunchError as error:
        reason = str(error)
    else:
        return
    raise LaunchError(f"--stage {stage.source}: {reason}")


@contextlib.contextmanager
def ending_raises() -> Iterator[None]:
    """Within it, a signal that ends this process raises `SystemExit`, once: `finally:` blocks remove files."""
    previous = {signum: signal.getsignal(signum) for signum in ENDING}

    def end(signum: int, frame: object) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    for signum, handler in previous.items():
        if signum == signal.SIGTERM or handler != signal.SIG_IGN:
            signal.signal(signum, end)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
