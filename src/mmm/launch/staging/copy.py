"""One host's copy of an environment: whether it is there, making it, and removing it.

A copy is complete or absent: it is unpacked under another name, and renamed; its mark is written last, once the copied
Python has been tried at its place. Its name has the source's key, so a source that has changed has another. Who uses it
holds a shared lock on its folder, and nobody removes it from under them. Ranks run what is in it, and its path can be
foretold: it is in a folder that this user alone can write to, or refused.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from mmm.launch.errors import LaunchError
from mmm.launch.files import open_own, parse_json, read_file
from mmm.launch.plan import stage

CHUNK = 1 << 20  # bytes
FILE_COSTS = 4096  # bytes of a disk, beyond its contents
MARK = ".mmm-stage.json"  # in a copy: what it had when it was complete
WRITTEN_LATER = "__pycache__"  # by any program that runs there
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
            is_folder = stat.S_ISDIR(info.st_mode)  # whose time changes with what is written later
            digest.update(_line(name, info, info.st_mode, 0 if is_folder else info.st_mtime_ns, link))
    return Source(path, digest.hexdigest()[:16], files, size)


def pack(source: Source) -> Iterator[bytes]:
    """The source as a tar file, in pieces of `CHUNK` to 2 · `CHUNK` bytes, the last shorter. Raises `OSError`."""
    is_archive, collected = os.path.isfile(source.path), bytearray()
    for piece in _read(source.path, source.size) if is_archive else _tar(source.path):
        collected += piece
        if len(collected) >= CHUNK:
            yield bytes(collected)
            collected.clear()
    if collected:
        yield bytes(collected)


class Copy:
    """This host's copy of `source`, below `folder` (None: the host's temporary one)."""

    def __init__(self, source: Source, folder: str | None) -> None:
        name = Path(source.path).name.lstrip(".").partition(".tar")[0] or "environment"
        self.source = source
        self.parent = Path(folder or tempfile.gettempdir()) / f"mmm-stage-{os.getuid()}"
        self.path = self.parent / f"{name}-{source.key}"
        self.part = self.parent / f".{self.path.name}.{socket.gethostname()}.{os.getpid()}"  # until it is complete
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

    def is_there(self) -> bool:
        """Whether it is there and complete; then nobody removes it until this process ends."""
        if self.lock is not None:
            return True
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as opened:
            lock = open_own(self.path)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # who has it for itself is removing the copy
            mark = parse_json(read_file(self.path / MARK))
            if mark.get("contents") == _contents(self.path) and os.path.samestat(os.fstat(lock), os.stat(self.path)):
                opened.pop_all()
                self.lock = lock
        return self.lock is not None

    def make_room(self) -> None:
        """Remove what killed processes have left. Raises `LaunchError`: too little space."""
        with self._alone():
            for path in self.parent.iterdir():
                maker, _, pid = path.name.rpartition(".")
                if path.name.startswith("."):
                    left = maker.endswith(f".{socket.gethostname()}") and pid.isdecimal() and not _is_alive(int(pid))
                else:
                    left = not os.path.lexists(path / MARK)  # killed while it was tried
                if left:
                    shutil.rmtree(path, ignore_errors=True)
        needed, free = self.source.size + FILE_COSTS * self.source.files, shutil.disk_usage(self.parent).free
        if needed > free:
            raise LaunchError(
                f"{needed / 1e6:,.0f} MB are needed in {self.parent}, and {free / 1e6:,.0f} MB are free (--stage-to)"
            )

    def make(self, pieces: Iterator[bytes]) -> None:
        """Make it of the tar file in `pieces`, all of which are taken. It `is_there` afterwards, or nothing is.

        Raises:
            LaunchError: the archive is none, or ranks cannot run by the Python in it. OSError.
        """
        try:
            self.part.mkdir(mode=0o700)
            self._unpack(pieces)
            for _ in pieces:  # what comes behind the archive's end
                pass
            self._complete()
        finally:
            shutil.rmtree(self.part, ignore_errors=True)

    def remove(self, keep: bool) -> None:
        """Unless it is to be kept, or another run uses it. At once gone for others; its files go one by one.

        The folder that copies are in stays: another run may be about to make one there. What is only half made, if a
        signal came while that was removed, goes in any case.
        """
        if self.lock is None:
            shutil.rmtree(self.part, ignore_errors=True)
        if self.lock is None or keep:
            return
        with contextlib.suppress(OSError):  # somebody else has a lock, or was faster
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self.lock), os.stat(self.path)):  # no other has taken the place of a damaged
                os.rename(self.path, self.part)
        shutil.rmtree(self.part, ignore_errors=True)
        os.close(self.lock)
        self.lock = None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within it no other process of this user's puts a copy at its place, or clears away."""
        folder = open_own(self.parent)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _unpack(self, pieces: Iterator[bytes]) -> None:
        stream = SimpleNamespace(read=lambda size: next(pieces, b""))
        has_filters = hasattr(tarfile, "tar_filter")  # not in the first releases of Python 3.10 and 3.11
        try:
            with tarfile.open(fileobj=stream, mode="r|*", bufsize=CHUNK) as tar:
                tar.extractall(self.part, **({"filter": _own} if has_filters else {}))  # type: ignore[arg-type]
                if not tar.fileobj.read(1):  # two blocks of zeros end it, and tarfile does without
                    raise tarfile.ReadError("no end")
        except tarfile.ReadError as error:
            raise LaunchError(f"the archive is cut short, or no tar ({error})") from None

    def _complete(self) -> None:
        """Make what was unpacked a copy that works at its place."""
        made = self.part
        inside = list(made.iterdir())
        if len(inside) == 1 and inside[0].is_dir() and os.path.isfile(self.source.path):
            made = inside[0]  # an archive of a folder, not of what is in it
        _repoint(made, self.source.path, str(self.path))
        (made / MARK).unlink(missing_ok=True)  # whatever an archive has there
        with self._alone():
            if self.is_there():  # made by another run meanwhile
                return
            shutil.rmtree(self.path, ignore_errors=True)  # incomplete: something has removed files from it
            os.rename(made, self.path)
            try:
                if python := stage.interpreter(self.source.path, str(self.path)):
                    _try(python, self.path, self.source.path)
                mark = {"contents": _contents(self.path), "source": self.source.path}
                (self.path / MARK).write_text(json.dumps(mark))
                if not self.is_there():
                    raise LaunchError(f"{self.path} was changed while it was made")
            finally:
                if self.lock is None:
                    shutil.rmtree(self.path, ignore_errors=True)


def _own(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """What is unpacked is of who unpacks it, also of root, whatever the archive says."""
    return tarfile.tar_filter(member, path).replace(uid=None, gid=None, uname=None, gname=None, deep=False)  # type: ignore[arg-type]


def _try(python: str, copy: Path, source: str) -> None:
    """Raises `LaunchError` unless ranks can run by the copied Python. What conda-pack has packed is first unpacked."""
    commands = [[python, "-c", CHECK]]
    if (copy / "bin" / "conda-unpack").exists():
        commands.insert(0, [python, str(copy / "bin" / "conda-unpack")])
    environ = {**os.environ, **stage.environment(os.environ, source, str(copy))}
    for command in commands:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/", env=environ
        )
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise LaunchError(f"the copied Python cannot start ranks ({last}): mmm has to be installed in it")


def _repoint(folder: Path, source: str, copy: str) -> None:
    """In what installers write absolute paths into, name the copy: the first lines of scripts, and `.pth` files."""
    scripts = list(folder.glob("bin/*"))
    packages = [
        path for name in ("*.pth", "__editable__*.py") for path in folder.glob(f"lib/python*/site-packages/{name}")
    ]
    for path in [*scripts, *packages]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LONGEST_SCRIPT:
            continue
        text, head = path.read_bytes(), b""
        if path in packages:
            head = text
        elif text.startswith(b"#!"):
            head = b"".join(text.splitlines(keepends=True)[:3])
        changed = head.replace(source.encode() + b"/", copy.encode() + b"/")
        if head != changed:
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWUSR)
            path.write_bytes(changed + text[len(head) :])
            path.chmod(mode)


def _tar(folder: str) -> Iterator[bytes]:
    """The blocks of a tar file of what is in `folder`."""
    with tarfile.open(fileobj=io.BytesIO(), mode="w", format=tarfile.GNU_FORMAT) as tar:  # which knows hard links
        for name in ("", *(name for name, _, _ in _walk(folder))):
            path = os.path.join(folder, name)
            member = tar.gettarinfo(path, os.path.join(".", name))
            if member is None:
                continue  # a socket
            yield member.tobuf(tarfile.GNU_FORMAT, tarfile.ENCODING, "surrogateescape")
            if member.isreg():
                yield from _read(path, member.size)
                yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _read(path: str, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while size > 0:
            piece = file.read(min(size, CHUNK))
            if not piece:
                raise OSError(f"{path} became shorter while it was read")
            size -= len(piece)
            yield piece


def _contents(folder: Path) -> str:
    """Tells whether files are missing, or have another size."""
    digest = hashlib.sha256()
    for name, info, _ in _walk(str(folder)):
        if WRITTEN_LATER not in name.split(os.sep) and name != MARK and not stat.S_ISDIR(info.st_mode):
            digest.update(_line(name, info))
    return digest.hexdigest()


def _line(name: str, info: os.stat_result, *more: object) -> bytes:
    """What a digest takes in of a file."""
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    return "\0".join(map(str, (name, size, *more))).encode("utf-8", "surrogateescape") + b"\n"


def _walk(folder: str, below: str = "") -> Iterator[tuple[str, os.stat_result, str]]:
    """Everything in it, by name: its status, and where a link points to."""
    with os.scandir(os.path.join(folder, below)) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = os.path.join(below, entry.name)
            yield name, entry.stat(follow_symlinks=False), os.readlink(entry.path) if entry.is_symlink() else ""
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder, name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
