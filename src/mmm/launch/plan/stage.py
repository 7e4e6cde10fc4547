"""`launch --stage PATH`: what is to be copied to every host, and what changes for ranks that run from the copy."""

import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmm.launch.errors import LaunchError

STAGED_VARIABLE = "MMM_STAGED"  # where the copy is, for the program
MAPPED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")  # variables that may name the source
INTERPRETERS = ("bin/python3", "bin/python")


@dataclass(frozen=True)
class Stage:
    """A folder, or a tar archive of one, that each host gets a copy of before its ranks start.

    Attributes:
        source: its absolute path. to: the folder on each host that gets the copy; None: that host's temporary folder.
        keep: leave the copy there for the next run.
    """

    source: str
    to: str | None = None
    keep: bool = False

    def __str__(self) -> str:
        return (
            f"{self.source} to {self.to or 'the temporary folder'} of each host, {'kept' if self.keep else 'removed'}"
        )

    def done(self, where: str, files: int, size: int, seconds: float) -> str:
        return f"launch: {self.source} is on {where} ({files:,} files, {size / 1e6:,.0f} MB, in {seconds:.1f} s)"


def from_words(path: str | None, to: str | None, keep: bool) -> Stage | None:
    """The options `--stage`, `--stage-to` and `--stage-keep`. Raises `LaunchError`."""
    if path is None:
        if to is not None or keep:
            raise LaunchError(f"{'--stage-keep' if to is None else '--stage-to'}: there is no --stage PATH to copy.")
        return None
    source = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(source):
        raise LaunchError(f"--stage {path}: there is no such folder or archive.")
    if not os.access(source, os.R_OK) or (not os.path.isdir(source) and not tarfile.is_tarfile(source)):
        raise LaunchError(f"--stage {path}: it has to be a folder, or a tar archive, that can be read.")
    if to is not None and not os.path.isabs(to):
        raise LaunchError(f"--stage-to {to}: give a whole path, of a folder on each host's own disk.")
    return Stage(source, to, keep)


def notes(stage: Stage) -> list[str]:
    """Says so where ranks will not read mmm's own files in the copy."""
    package = str(Path(__file__).parents[2])
    inside = _inside(sys.prefix, stage.source) and not _inside(package, stage.source)
    return [f"--stage: mmm itself is not in {stage.source} but in {package}: ranks read it there"] if inside else []


def interpreter(source: str, copy: str) -> str | None:
    """The Python in `copy` by which ranks run: this process's, if it is in `source`, or any. None: there is none."""
    names = [os.path.relpath(sys.executable, source)] if _inside(sys.executable, source) else INTERPRETERS
    return next((path for name in names if os.access(path := os.path.join(copy, name), os.X_OK)), None)


def environment(environ: Mapping[str, str], source: str, copy: str) -> dict[str, str]:
    """Variables other than in `environ` of a rank that runs from `copy`, whose programs come first on PATH."""
    changed = {STAGED_VARIABLE: copy}
    for name in MAPPED:
        if name in environ:
            parts = [mapped(part, source, copy) for part in environ[name].split(os.pathsep)]
            changed[name] = os.pathsep.join(parts)
    if os.path.isdir(programs := os.path.join(copy, "bin")):
        others = [part for part in changed.get("PATH", os.defpath).split(os.pathsep) if part != programs]
        changed["PATH"] = os.pathsep.join([programs, *others])
    if os.path.exists(os.path.join(copy, "pyvenv.cfg")):
        changed["VIRTUAL_ENV"] = copy
    return {name: value for name, value in changed.items() if environ.get(name) != value}


def mapped(path: str, source: str, copy: str) -> str:
    """`path`, or if that is in `source` the same in `copy`."""
    return os.path.normpath(os.path.join(copy, os.path.relpath(path, source))) if _inside(path, source) else path


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
