"""``checkpoint.json``: which run a checkpoint belongs to, and the checksums of its files. Imports no torch."""

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
# Ends the name of a folder that is being written or removed.
PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)")
# Bytes that are read at once for a checksum.
CHUNK = 1 << 22


class LaterVersionError(CheckpointError):
    """The checkpoint was written by a later version of mmm."""


class FileSum(NamedTuple):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds besides its tensors.

    Attributes:
        step: number of optimizer steps that are done.
        identity: what must be equal in a run that resumes from it: the model's sizes, the data, …
        state: what else the run needs in order to resume, as JSON.
        about: facts for people: options, layout, versions.
        files: size and checksum of every other file in the folder, by name.
    """

    step: int
    identity: dict[str, Any]
    state: dict[str, Any]
    about: dict[str, Any]
    files: dict[str, FileSum]

    def write(self, folder: Path) -> None:
        """Write ``checkpoint.json`` into a folder, atomically."""
        fields = {"mmm_checkpoint": VERSION, **asdict(self)}
        fields["files"] = {name: list(file) for name, file in self.files.items()}
        # The digest is of the fields without itself.
        fields["sha256"] = _digest(fields)
        text = json.dumps(fields, indent=2)
        write_atomically(folder / MANIFEST, text.encode())

    def differences(self, identity: Mapping[str, Any]) -> list[str]:
        """Compare with the identity of the run that wants to resume; returns texts like ``dim 64 there, 128 here``.

        A field that only one of the two has, and that is off (None, False, 0), is not a difference: an earlier mmm did
        not know that field.
        """
        texts = []
        for name in dict.fromkeys([*self.identity, *identity]):
            saved = self.identity.get(name)
            own = identity.get(name)
            if saved == own or not (saved or own):
                continue
            saved_text = "none" if saved is None else saved
            own_text = "none" if own is None else own
            texts.append(f"{name} {saved_text} there, {own_text} here")
        return texts


def read_manifest(folder: Path) -> Manifest:
    """Read and check the ``checkpoint.json`` of a folder.

    Raises:
        CheckpointError: the file is missing or damaged, or a later version wrote it.
    """
    path = folder / MANIFEST
    fields = read_json(path, CheckpointError)
    version = fields.pop("mmm_checkpoint", None)
    digest = fields.pop("sha256", None)
    files = fields.pop("files", None)
    # type(…) is int: JSON's true is an int to isinstance.
    if type(version) is not int or not _is_well_formed(fields, files):
        raise CheckpointError(f"{path} is damaged: mmm does not write such a file")
    if version != VERSION:
        raise LaterVersionError(f"{path} has version {version}, and this mmm reads version {VERSION}: use a later mmm")
    # Keys are sorted in the digest: their order here does not count.
    if digest != _digest({"mmm_checkpoint": version, "files": files, **fields}):
        raise CheckpointError(f"{path} is damaged: its checksum is not the one that was written")
    sums = {name: FileSum(*file) for name, file in files.items()}
    return Manifest(**fields, files=sums)


def _is_well_formed(fields: Mapping[str, Any], files: Any) -> bool:
    """Whether a manifest has its fields, of the right types, and no others."""
    if fields.keys() != {"step", "identity", "state", "about"}:
        return False
    step = fields["step"]
    if type(step) is not int or not 0 <= step < 1 << 63:
        return False
    for name in ("identity", "state", "about"):
        if not isinstance(fields[name], dict):
            return False
    # A plain name cannot lead to a file outside the checkpoint's folder.
    if not isinstance(files, dict) or not all(map(is_plain_name, files)):
        return False
    # JSON has a `FileSum` as a list.
    for file in files.values():
        types = list(map(type, file)) if isinstance(file, list) else []
        if types != [int, str]:
            return False
    return True


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sum(path: Path) -> FileSum:
    """Size and SHA-256 of what is on the disk.

    Where the operating system can be told to, it first drops its own copy of the file in memory.
    """
    digest = hashlib.sha256()
    size = 0
    with open_file(path) as file:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileSum(size, digest.hexdigest())


def broken_file(folder: Path, files: Mapping[str, FileSum], sums: bool = True) -> str | None:
    """Find the first of `files` that is not as it was written, and say why; None if all are.

    Every file must be in the folder itself: a link or anything that is not a regular file is refused before a byte of
    it is read.

    Args:
        sums: read the files and compare their checksums. If False, compare only their kind and size.
    """
    for name, expected in files.items():
        path = folder / name
        try:
            # lstat: the status of a link, not of the file that it points to.
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                return f"{path} is a link, and was written as a file"
            if not stat.S_ISREG(status.st_mode):
                return f"{path} is not a file, and was written as one"
            size = status.st_size
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
    """List the complete checkpoints in a folder, the newest first; empty if there is no such folder."""
    steps = []
    try:
        for path in checkpoints.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None:
                steps.append((int(match[1]), path))
    except OSError:
        return []
    return [path for _, path in sorted(steps, reverse=True)]


def complete(partial: Path, keep: int) -> Path:
    """Give a checkpoint its final name, replacing one that has it; then remove the older ones.

    Args:
        keep: number of checkpoints that stay, the newest ones.
    """
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    # A run that was resumed from an earlier step saves this step again.
    remove([path])
    os.rename(partial, path)
    # The new name must be on the disk before older checkpoints are removed.
    _sync(path.parent)
    remove(steps_of(path.parent)[keep:])
    return path


def remove(folders: Sequence[Path]) -> None:
    """Remove checkpoints. Each loses its name first, so that nobody ever sees half of one."""
    for folder in folders:
        if folder.exists():
            renamed = folder.with_name(f"{folder.name}.old{PARTIAL}")
            # A kill during an earlier removal may have left this one.
            shutil.rmtree(renamed, ignore_errors=True)
            os.rename(folder, renamed)
            shutil.rmtree(renamed, ignore_errors=True)


def discard(partial: Path) -> None:
    """Remove what a failed save has left, if the disk allows it."""
    with contextlib.suppress(OSError):
        remove([partial])


def remove_partial(checkpoints: Path) -> None:
    """Remove what a kill has left of checkpoints that were being written or removed."""
    for path in checkpoints.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
