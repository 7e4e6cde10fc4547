"""checkpoint.json: what a checkpoint is of, and the sums by which its files are checked. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmm.errors import CheckpointError
from mmm.history.record.folder import reason, write_atomically
from mmm.outside import is_plain_name, open_file, read_json

VERSION = 1
MANIFEST = "checkpoint.json"
PARTIAL = ".partial"  # ends the name of a folder that is being written, or removed
_NAME = re.compile(r"step-(\d+)")
CHUNK = 1 << 22  # bytes read at once


class LaterVersionError(CheckpointError):
    """A later mmm has written it."""


class FileSum(NamedTuple):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """
    Attributes:
        step: optimizer steps that are done.
        identity: what has to be equal where the run goes on: the model's sizes, the data, …
        state: what else the run needs, as JSON has it. about: for people: options, layout, versions.
        files: all others of the folder, by name.
    """

    step: int
    identity: dict[str, Any]
    state: dict[str, Any]
    about: dict[str, Any]
    files: dict[str, FileSum]

    def write(self, folder: Path) -> None:
        fields = {"mmm_checkpoint": VERSION, **asdict(self)}
        fields["files"] = {name: list(found) for name, found in self.files.items()}
        text = json.dumps(fields | {"sha256": _digest(fields)}, indent=2)
        write_atomically(folder / MANIFEST, text.encode())

    def differences(self, identity: Mapping[str, Any]) -> list[str]:
        """Such as ``dim 64 there, 128 here``. What an earlier mmm did not know was off: that is no difference."""
        both = dict.fromkeys([*self.identity, *identity])
        pairs = [(name, self.identity.get(name), identity.get(name)) for name in both]
        return [
            f"{name} {'none' if there is None else there} there, {'none' if given is None else given} here"
            for name, there, given in pairs
            if there != given and (there or given)
        ]


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        CheckpointError: there is none, it is damaged, or of a later version.
    """
    path = folder / MANIFEST
    fields = read_json(path, CheckpointError)
    version, digest, files = (fields.pop(name, None) for name in ("mmm_checkpoint", "sha256", "files"))
    if type(version) is not int or not _has_all(fields, files):
        raise CheckpointError(f"{path} is damaged: it is not what mmm has written")
    if version != VERSION:
        text = f"{path} is of version {version}, and this mmm reads version {VERSION}: use a later mmm"
        raise LaterVersionError(text)
    if digest != _digest({"mmm_checkpoint": version, "files": files, **fields}):
        raise CheckpointError(f"{path} is damaged: its checksum is not the one that was written")
    return Manifest(**fields, files={name: FileSum(*found) for name, found in files.items()})


def _has_all(fields: Mapping[str, Any], files: Any) -> bool:
    """Whether a manifest has its fields and no others, and its files are beside it."""
    step = fields.get("step")
    return (
        fields.keys() == {"step", "identity", "state", "about"}
        and type(step) is int
        and 0 <= step < 1 << 63
        and all(isinstance(fields[name], dict) for name in ("identity", "state", "about"))
        and isinstance(files, dict)
        and all(map(is_plain_name, files))
        and all(isinstance(found, list) and [type(each) for each in found] == [int, str] for found in files.values())
    )


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def file_sum(path: Path) -> FileSum:
    """Of what is on the disk: the operating system's copy in memory is dropped first, where it can be told to."""
    digest, size = hashlib.sha256(), 0
    with open_file(path) as file:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileSum(size, digest.hexdigest())


def broken_file(folder: Path, files: Mapping[str, FileSum], sums: bool = True) -> str | None:
    """The first of `files` that is not as it was written, and why; None if all are.

    Each is to be in the folder itself: a link is refused, and so is what is no file, before any byte is read.

    Args:
        sums: read the files. Otherwise kind and size alone are looked at.
    """
    for name, expected in files.items():
        path = folder / name
        try:
            there = path.lstat()
            if not stat.S_ISREG(there.st_mode):
                return f"{path} is {'a link' if stat.S_ISLNK(there.st_mode) else 'no file'}, and was written as a file"
            size = there.st_size
            if size != expected.size:
                return f"{path} is truncated: {size:,} bytes of {expected.size:,}"
            if sums and file_sum(path).sha256 != expected.sha256:
                return f"{path} is damaged: its checksum is not the one that was written"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {reason(error)}"
    return None


def steps_of(checkpoints: Path) -> list[Path]:
    """The checkpoints in a folder that have been named complete, the newest first; empty without such a folder."""
    try:
        found = [(int(match[1]), path) for path in checkpoints.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def complete(partial: Path, keep: int) -> Path:
    """Give a checkpoint its name, in place of one that may have it; then remove those that are not to stay.

    Args:
        keep: the newest that stay.
    """
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    remove([path])
    os.rename(partial, path)
    _sync(path.parent)
    remove(steps_of(path.parent)[keep:])
    return path


def remove(folders: Sequence[Path]) -> None:
    """Remove checkpoints. Each loses its name first, so that none is ever seen in part."""
    for folder in folders:
        if folder.exists():
            going = folder.with_name(f"{folder.name}.old{PARTIAL}")
            shutil.rmtree(going, ignore_errors=True)
            os.rename(folder, going)
            shutil.rmtree(going, ignore_errors=True)


def discard(partial: Path) -> None:
    """Remove what a save that failed has left, where the disk lets it."""
    with contextlib.suppress(OSError):
        remove([partial])


def remove_partial(checkpoints: Path) -> None:
    """Remove what a kill has left of checkpoints that were being written or removed."""
    for path in checkpoints.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush a folder's names to the disk, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
