"""`launch --stage PATH`: what is copied to every host, and what changes for ranks that run from the copy.

`mmm_launch.host.stage` writes the archive and unpacks it.
"""

import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from mmm_launch.errors import LaunchError

# Where the copy is. Programs can read it.
STAGED_VARIABLE = "MMM_STAGED"
# Variables with paths that may lie in the source.
MAPPED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
INTERPRETERS = ("bin/python3", "bin/python")


@dataclass(frozen=True)
class Stage:
    """A folder, or a tar archive of one, that each host unpacks on its own disk before its ranks start.

    Attributes:
        source: absolute path of the folder or the archive.
        to: folder on each host that gets the copy. None: that host's temporary folder.
        archive: path of the archive that all hosts read, once there is one.
        sha256: SHA-256 of the archive, in hexadecimal.
    """

    source: str
    to: str | None = None
    archive: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.source} to {self.to or 'the temporary folder'} of each host"


def of_options(path: str | None, to: str | None) -> Stage | None:
    """Reads the options `--stage` and `--stage-to`. Raises `LaunchError`."""
    if path is None:
        return None
    source = os.path.abspath(path)
    is_archive = os.path.isfile(source) and tarfile.is_tarfile(source)
    if not os.path.isdir(source) and not is_archive:
        raise LaunchError(f"--stage {path}: there is no such folder or tar archive.")
    if to is not None and not os.path.isabs(to):
        raise LaunchError(f"--stage-to {to}: give an absolute path, of a folder on each host's own disk.")
    return Stage(source, to)


def interpreter(source: str, copy: str) -> str | None:
    """Finds the Python in `copy` that runs the ranks. None: the copy has no Python, so ranks use launch's own.

    If launch's own Python lies in `source`, ranks use the same file in the copy.
    """
    names = list(INTERPRETERS)
    if is_inside(sys.executable, source):
        names = [os.path.relpath(sys.executable, source)]
    for name in names:
        path = os.path.join(copy, name)
        if os.access(path, os.X_OK):
            return path
    return None


def environment(environ: Mapping[str, str], source: str, copy: str) -> dict[str, str]:
    """Returns the variables that differ from `environ` for a rank that runs from `copy`."""
    changed = {STAGED_VARIABLE: copy}
    for name in MAPPED:
        if name in environ:
            paths = [mapped(path, source, copy) for path in environ[name].split(os.pathsep)]
            changed[name] = os.pathsep.join(paths)
    # The programs of the copy come first, as after activating it.
    programs = os.path.join(copy, "bin")
    if os.path.isdir(programs):
        changed["PATH"] = os.pathsep.join([programs, changed.get("PATH", os.defpath)])
    if os.path.exists(os.path.join(copy, "pyvenv.cfg")):
        changed["VIRTUAL_ENV"] = copy
    return changed


def mapped(path: str, source: str, copy: str) -> str:
    """Returns the place in `copy` of a path in `source`. Any other path is returned as it is."""
    if not is_inside(path, source):
        return path
    return os.path.normpath(os.path.join(copy, os.path.relpath(path, source)))


def is_inside(path: str, folder: str) -> bool:
    # /env2 begins with /env, and is not in it: the separator has to follow.
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
