"""One host's copy of an environment: whether it is there, unpacking it, and removing it.

A copy is complete or absent: it is made under another name, and renamed. Its name has the source's key, so a source
that has changed has another. Who uses it holds a shared lock on its folder, and nobody removes it from under them.
Ranks run what is in it, and its path can be foretold: it is in a folder that this user alone can write to, or refused.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mmm.errors import LaunchError
from mmm.launch.host.own import open_own
from mmm.launch.job import staging
from mmm.outside import parse_json, read_file

CHUNK = 1 << 20  # bytes
FILE_COSTS = 4096  # bytes of a disk, beyond its contents
MARK = ".mmm-stage.json"  # in a copy: what it had when it was complete
WRITTEN_LATER = "__pycache__"  # by any program that runs there
TRIAL = ".trial."
CHECK = "import mmm.launch.host.forkserver, sys; sys.exit(0)"
LONGEST_SCRIPT = 1 << 20  # bytes; a larger file in bin is no script


@dataclass(frozen=True)
class Source:
    """What is to be copied, as one host has found it. `key`: of its names, sizes and times, not of what is in files."""

    path: str
    key: str
    files: int
    size: int  # bytes


def scan(path: str) -> Source:
    """Raises `OSError`: something in it cannot be read."""
    digest, files, size = hashlib.sha256(os.fsencode(path)), 0, 0
    for name, info, link in [("", os.stat(path), "")] if os.path.isfile(path) else _walk(path):
        if stat.S_ISREG(info.st_mode):
            files, size = files + 1, size + info.st_size
        if WRITTEN_LATER not in name.split(os.sep):
            when = (
                0 if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns
            )  # a folder's changes with what is written later
            digest.update(f"{name}\0{info.st_mode}\0{_size(info)}\0{when}\0{link}\n".encode("utf-8", "surrogateescape"))
    return Source(path, digest.hexdigest()[:16], files, size)


def pack(source: Source, emit: Callable[[bytes], None]) -> None:
    """Hand `emit` the source as a tar file, in pieces. Raises `OSError`."""
    if os.path.isfile(source.path):
        with open(source.path, "rb") as file:
            while piece := file.read(CHUNK):
                emit(piece)
        return
    stream = type("Stream", (), {"write": lambda self, data: emit(bytes(data))})()
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=CHUNK) as tar:
        tar.add(source.path, arcname=".")


class Copy:
    """This host's copy of `source`, below `folder` (None: the host's temporary one)."""

    def __init__(self, source: Source, folder: str | None) -> None:
        name = Path(source.path).name.lstrip(".").partition(".tar")[0] or "environment"
        self.source = source
        self.parent = Path(folder or tempfile.gettempdir()) / f"mmm-stage-{os.getuid()}"
        self.path = self.parent / f"{name}-{source.key}"
        maker = f"{socket.gethostname()}.{os.getpid()}"
        self.part = self.parent / f".{self.path.name}.{maker}"
        self.trial = self.parent / f"{TRIAL}{self.path.name}.{maker}"  # the folder that is to become it; until it has
        self.lock: int | None = None

    def own_folder(self) -> None:
        """Make sure of the folder that copies are in, before anything in it is opened. Raises `LaunchError`."""
        try:
            self.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(open_own(self.parent))
        except OSError as error:
            raise LaunchError(f"{self.parent}: {error.strerror} (--stage-to names another)") from None
        above = self.parent.parent.stat().st_mode
        if above & stat.S_IWOTH and not above & stat.S_ISVTX:
            raise LaunchError(f"{self.parent.parent}: anybody can replace what is in it (--stage-to names another)")

    def there(self) -> bool:
        """Whether it is there and complete; then nobody removes it until this process ends, not even `discard`."""
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as opened:
            lock = open_own(self.path)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # who has it for itself is removing the copy
            mark = parse_json(read_file(self.path / MARK))
            complete = mark.get("contents") == _contents(self.path)
            if complete and os.path.samestat(os.fstat(lock), os.stat(self.path)):
                opened.pop_all()
                self.lock = lock
                self.trial.unlink(missing_ok=True)
                return True
        return False

    def make_room(self) -> None:
        """Remove what killed processes have left. Raises `LaunchError`: too little space."""
        for path in self.parent.glob(f".*.{socket.gethostname()}.*"):
            name, _, pid = path.name.rpartition(".")
            if pid.isdecimal() and not _alive(int(pid)):
                if name.startswith(TRIAL):
                    copy = name.removeprefix(TRIAL).removesuffix(f".{socket.gethostname()}")
                    _undo(path, self.parent / copy)
                shutil.rmtree(path, ignore_errors=True)
        needed, free = self.source.size + FILE_COSTS * self.source.files, shutil.disk_usage(self.parent).free
        if needed > free:
            raise LaunchError(
                f"{needed / 1e6:,.0f} MB are needed in {self.parent}, and {free / 1e6:,.0f} MB are free (--stage-to)"
            )

    @contextlib.contextmanager
    def unpacking(self) -> Iterator[Callable[[bytes], None]]:
        """Takes the pieces that `pack` has made. The copy is there afterwards, or nothing is.

        Until `there` has said so, `discard` still removes it.
        """
        read, write = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, CHUNK)
        errors: list[Exception] = []
        self.part.mkdir(mode=0o700)
        thread = threading.Thread(target=self._unpack, args=(read, errors), daemon=True)
        thread.start()

        def feed(piece: bytes) -> None:
            try:
                while piece:
                    piece = piece[os.write(write, piece) :]
            except BrokenPipeError:
                thread.join()
                raise errors[0] from None

        try:
            yield feed
            os.close(write)
            write = -1
            thread.join()
            if errors:
                raise errors[0]
            self._complete()
        except BaseException:
            if write >= 0:
                os.close(write)
            thread.join()
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what has not become a copy, also where the process that made it was killed."""
        shutil.rmtree(self.part, ignore_errors=True)
        _undo(self.trial, self.path)

    def remove(self) -> None:
        """Unless another run uses it. At once gone for others; its files go one by one."""
        if self.lock is None:
            return
        with contextlib.suppress(OSError):  # somebody else has a lock, or was faster
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(self.path, self.part)
        self.discard()
        os.close(self.lock)
        self.lock = None
        with contextlib.suppress(OSError):  # another copy is there
            os.rmdir(self.parent)

    def _unpack(self, read: int, errors: list[Exception]) -> None:
        try:
            with open(read, "rb", buffering=CHUNK) as stream:
                with tarfile.open(fileobj=stream, mode="r|*", bufsize=CHUNK) as tar:
                    if hasattr(tarfile, "tar_filter"):  # not in the first releases of Python 3.10 and 3.11
                        tar.extractall(self.part, filter=_own)
                    else:
                        tar.extractall(self.part)
                    if not tar.fileobj.read(1):  # two blocks of zeros end it, and tarfile does without
                        raise tarfile.ReadError("no end")
                _drain(stream)
        except tarfile.ReadError as error:
            errors.append(LaunchError(f"the archive is cut short, or no tar ({error})"))
        except Exception as error:
            errors.append(error)

    def _complete(self) -> None:
        """Make what was unpacked a copy that works at its place."""
        made = self.part
        inside = list(made.iterdir())
        if len(inside) == 1 and inside[0].is_dir() and os.path.isfile(self.source.path):
            made = inside[0]  # an archive of a folder, not of what is in it
        _repoint(made, self.source.path, str(self.path))
        (made / MARK).unlink(missing_ok=True)  # whatever an archive has there
        (made / MARK).write_text(json.dumps({"contents": _contents(made), "source": self.source.path}))
        self.trial.write_text(str(made.stat().st_ino))  # by which `discard` tells it from another run's
        try:
            os.rename(made, self.path)
        except OSError:
            if self.there():  # made by another run meanwhile
                return
            shutil.rmtree(self.path, ignore_errors=True)  # incomplete: something has removed files from it
            os.rename(made, self.path)
        shutil.rmtree(self.part, ignore_errors=True)  # what was around an archive's folder
        python = staging.interpreter(self.source.path, str(self.path))
        if python is not None:
            _try(python, self.path, self.source.path)


def _own(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """What is unpacked is of who unpacks it, also of root, whatever the archive says."""
    return tarfile.tar_filter(member, path).replace(uid=None, gid=None, uname=None, gname=None, deep=False)  # type: ignore[arg-type]


def _undo(trial: Path, copy: Path) -> None:
    """Remove the copy that `trial` is about, if it got as far as its place, and `trial`."""
    with contextlib.suppress(OSError, ValueError):  # no trial; cut short, and so before there was a copy
        if copy.stat().st_ino == int(trial.read_text()):
            shutil.rmtree(copy, ignore_errors=True)
    with contextlib.suppress(OSError):
        trial.unlink(missing_ok=True)


def _try(python: str, copy: Path, source: str) -> None:
    """Raises `LaunchError` unless ranks can run by the copied Python. What conda-pack has packed is first unpacked."""
    commands = [[python, "-c", CHECK]]
    if (copy / "bin" / "conda-unpack").exists():
        commands.insert(0, [python, str(copy / "bin" / "conda-unpack")])
    environ = {**os.environ, **staging.environment(os.environ, source, str(copy))}
    for command in commands:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/", env=environ
        )
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise LaunchError(f"the copied Python cannot start ranks ({last}): mmm has to be installed in it")


def _repoint(folder: Path, source: str, copy: str) -> None:
    """In what installers write absolute paths into, name the copy: the first lines of scripts, and `.pth` files."""
    packages = [
        *folder.glob("lib/python*/site-packages/*.pth"),
        *folder.glob("lib/python*/site-packages/__editable__*.py"),
    ]
    for path in [*folder.glob("bin/*"), *packages]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LONGEST_SCRIPT:
            continue
        text = path.read_bytes()
        is_script = path not in packages
        if is_script and not text.startswith(b"#!"):
            continue
        end = len(b"".join(text.splitlines(keepends=True)[:3])) if is_script else len(text)
        head = text[:end].replace(source.encode() + b"/", copy.encode() + b"/")
        if head != text[:end]:
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWUSR)
            path.write_bytes(head + text[end:])
            path.chmod(mode)


def _contents(folder: Path) -> str:
    """Tells whether files are missing, or have another size."""
    digest = hashlib.sha256()
    for name, info, _ in _walk(str(folder)):
        if WRITTEN_LATER not in name.split(os.sep) and name != MARK and not stat.S_ISDIR(info.st_mode):
            digest.update(f"{name}\0{_size(info)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _walk(folder: str, below: str = "") -> Iterator[tuple[str, os.stat_result, str]]:
    """Everything in it, by name: its status, and where a link points to."""
    with os.scandir(os.path.join(folder, below)) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = os.path.join(below, entry.name)
            yield name, entry.stat(follow_symlinks=False), os.readlink(entry.path) if entry.is_symlink() else ""
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder, name)


def _size(info: os.stat_result) -> int:
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def _drain(stream: IO[bytes]) -> None:
    while stream.read(CHUNK):
        pass


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
