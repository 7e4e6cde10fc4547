"""Makes a run's folder, knows which files in it belong to the record, and writes its config.json.

Everything here runs on rank 0, before any process group is made, and imports neither torch nor xarray.
"""

import contextlib
import dataclasses
import enum
import json
import math
import os
import platform
import stat
import tempfile
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import mmm
from mmm.errors import RecordError
from mmm.outside import free_there

CONFIG = "config.json"
DATASET = "train_dataset.h5"
JOURNAL = "journal.jsonl"
# A journal that could not be read to its end.
DAMAGED = "journal-damaged.jsonl"
LOG = "log.txt"
PLOTS = "plots"
# Folder of profiles: a file for each rank.
TRACES = "traces"
# What earlier versions wrote.
PROFILES = ("profile.txt", "profile.html")
# Which run of a tracker this is: `mmm.history.record.trackers`.
TRACKER = "tracker.txt"

# Name of a variable: seconds of a step in which a rank does not wait for others.
OWN = "dt_own"

# Plots, which --overwrite removes. Older records have a list of them.
PLOT_FILES = ("plots/mplot/pngs/*.png", "plots/mplot/svgs/*.svg", "plots/tplot/*.txt", "plots/files.json")

# Any of these files makes a folder a record.
_RECORD = (CONFIG, DATASET, JOURNAL)
_OWN = (
    *_RECORD,
    f"{CONFIG}.tmp",
    f"{DATASET}.tmp",
    f"{JOURNAL}.tmp",
    DAMAGED,
    LOG,
    *PROFILES,
    TRACKER,
)
# Packages whose versions a record names.
_PACKAGES = ("torch", "numpy", "xarray", "h5netcdf", "h5py")


def prepare(
    outdir: Path | str | None,
    module: str,
    overwrite: bool = False,
    keeps_record: bool = False,
    name: str | None = None,
) -> Path:
    """Make the folder of a run and return its absolute path. Call it once, on rank 0, before any process group.

    Args:
        outdir: the folder itself. None makes ``outputs/<module>/<YYYY-MM-DD-HHMMSS>`` in the working directory; if
            that exists, ``-2``, ``-3``, … is added.
        module: name of the program, e.g. ``fsdp_tp``. It is only used if `outdir` is None.
        overwrite: whether to remove an existing record's own files (config.json, the dataset, the journal, log.txt,
            plots, traces, profiles). Checkpoints and other files stay.
        keeps_record: whether an existing record stays, because the run continues it.
        name: name of the run. If `outdir` is None, the folder is ``outputs/<module>/<name>``.

    Raises:
        RecordError: the folder holds a record and `overwrite` is off, or it cannot be made or written to.
    """
    if outdir is None:
        return writable(_fresh(Path.cwd() / "outputs" / module, name))
    folder = Path(outdir).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"--outdir {folder} is a file, and a run's record is a folder. Give another --outdir.")
    existing = [name for name in _RECORD if os.path.lexists(folder / name)]
    if existing and not overwrite and not keeps_record:
        raise RecordError(
            f"--outdir {folder} already holds a run's record ({', '.join(existing)}). "
            "Give another --outdir, leave it out (each run then gets a folder of its own), or pass --overwrite."
        )
    writable(folder)
    if overwrite and not keeps_record:
        _remove_record(folder)
    return folder


def write_config(outdir: Path | str, config: Any) -> Path:
    """Write `config` to ``outdir/config.json``, atomically, and return the path.

    Dataclasses become mappings, sets sorted lists, and enum members their names. What JSON lacks becomes text: paths,
    torch dtypes, NaN and infinities; any other object by ``str``.

    Args:
        outdir: the run's folder.
        config: a mapping or a dataclass, which may be nested.

    Raises:
        RecordError: the file cannot be written.
    """
    path = Path(outdir) / CONFIG
    # A path may have bytes that are not text. In JSON they are escapes.
    content = f"{encode(config)}\n".encode("utf-8", "backslashreplace")
    write_atomically(path, content)
    return path


def encode(value: Any) -> str:
    """Encode a value as `write_config` does."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def versions() -> dict[str, str]:
    """Return the versions of Python, mmm and the packages that a record depends on: name → version.

    They are read from the packages' metadata: nothing is imported.
    """
    by_name = {"python": platform.python_version(), "mmm": mmm.__version__}
    for name in _PACKAGES:
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a file next to `path`, flush it to the disk, then rename it to `path`.

    Whoever could read the file before, or the record that it belongs to, still can. A link that somebody has put in the
    place of the temporary file, which would lead the content elsewhere, is removed.

    Raises:
        RecordError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb", opener=_not_through_a_link) as file:
            keep_mode(path, temporary)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


def keep_mode(path: Path, new: Path) -> None:
    """Give a file that will be renamed to `path` the permissions of the file there, or of the record next to it.

    A run may be resumed under another umask than it began with.
    """
    for name in (path.name, *_RECORD):
        existing = path.with_name(name)
        if existing.is_file():
            new.chmod(stat.S_IMODE(existing.stat().st_mode))
            return


def _not_through_a_link(path: str, flags: int) -> int:
    """Open a file, as ``open`` asks its `opener` to, but never the file that a link points to."""
    if os.path.islink(path):
        os.unlink(path)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def cannot_write(path: Path, error: OSError) -> RecordError:
    """Make the error for a failed write: it names the path, the system's reason, and the bytes that are free there."""
    return RecordError(
        f"cannot write {path}: {reason(error)}; {free_there(path.parent)}. What was written before stays readable. "
        "Free some space or quota, or give an --outdir on another file system."
    )


def reason(error: OSError) -> str:
    """Return the system's reason for an error, as short as possible."""
    return error.strerror or str(error) or type(error).__name__


def _fresh(parent: Path, name: str | None = None) -> Path:
    """Make a folder in `parent` that did not exist before, named `name` or, by default, after the present second."""
    _make(parent)
    name = name or datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = parent / name
    count = 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            count += 1
            folder = parent / f"{name}-{count}"
        except OSError as error:
            raise RecordError(f"cannot make {folder}: {reason(error)}. Give an --outdir you may write to.") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # The usual cause: a folder of the path is a file.
        files = [path for path in (folder, *folder.parents) if path.is_file()]
        why = f"{files[0]} is a file" if files else reason(error)
        raise RecordError(f"cannot make the folder {folder}: {why}. Give an --outdir you may write to.") from error


def writable(folder: Path) -> Path:
    """Make a folder, check that files can be made in it, and return it. Raises RecordError if they cannot."""
    _make(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecordError(f"cannot write to {folder}: {reason(error)}. Give an --outdir you may write to.") from error
    return folder


def trace_of(rank: int | str) -> str:
    """Return the path of a rank's trace within a run's folder; ``*`` gives a pattern for all ranks."""
    return f"{TRACES}/rank-{rank}.json.gz"


def own_files(folder: Path) -> list[Path]:
    """List the files that a record may have, without the user's files and checkpoints."""
    files = [folder / name for name in _OWN]
    for pattern in ("fingerprints-*.jsonl", trace_of("*"), *PLOT_FILES):
        for path in folder.glob(pattern):
            # A folder such as plots may be a link to a folder elsewhere, whose files are not the record's.
            if path.parent.resolve().is_relative_to(folder.resolve()):
                files.append(path)
    return files


def _remove_record(folder: Path) -> None:
    """Remove a record's own files.

    Checkpoints stay, because they are costly, and a new run that saves replaces those of its steps.
    """
    for path in own_files(folder):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RecordError(
                f"--overwrite cannot remove {path}: {reason(error)}. Remove it by hand or give another --outdir."
            ) from error


def remove_new(folder: Path) -> None:
    """Remove what a run has made that was refused before its first row, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError, RecordError):
        _remove_record(folder)
        for empty in (folder / "checkpoints", folder / TRACES, folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


def _plain(value: Any) -> Any:
    """Convert a value to JSON's own types."""
    # First, because a member of an IntEnum is an int as well.
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {}
        for field in dataclasses.fields(value):
            plain[field.name] = _plain(getattr(value, field.name))
        return plain
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if type(value).__module__ == "numpy":
        return _plain(value.tolist())
    return str(value)
