"""A run's folder: where it is, what belongs to it, and its config.json.

Everything here runs on rank 0, before any process group is made, and imports neither torch nor xarray.
"""

import contextlib
import dataclasses
import enum
import json
import math
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import mmm
from mmm.errors import RecordError

CONFIG = "config.json"
DATASET = "train_dataset.h5"
JOURNAL = "journal.jsonl"
DAMAGED = "journal-damaged.jsonl"  # one that could not be read to its end
LOG = "log.txt"
PLOTS = "plots"
TRACES = "traces"  # of a profile, a file each rank
PROFILE_TEXT = "profile.txt"
PROFILE_PAGE = "profile.html"
OWN = "dt_own"  # a variable: of a step's time, that in which this rank waits for no other
# Plots, which --overwrite removes; older records have a list of them.
PLOT_FILES = ("plots/mplot/pngs/*.png", "plots/mplot/svgs/*.svg", "plots/tplot/*.txt", "plots/files.json")

_RECORD = (CONFIG, DATASET, JOURNAL)  # any of these makes a folder a record
_OWN = (
    *_RECORD,
    f"{CONFIG}.tmp",
    f"{DATASET}.tmp",
    f"{JOURNAL}.tmp",
    DAMAGED,
    LOG,
    PROFILE_TEXT,
    PROFILE_PAGE,
)
_PACKAGES = ("torch", "numpy", "xarray", "h5netcdf", "h5py")


def prepare(
    outdir: Path | str | None, module: str, overwrite: bool = False, goes_on: bool = False, name: str | None = None
) -> Path:
    """Make the folder of a run and return its absolute path. Call it once, on rank 0, before any process group.

    Args:
        outdir: the folder itself; None makes ``outputs/<module>/<YYYY-MM-DD-HHMMSS>`` under the working directory
            (``-2``, ``-3``, … is added where that is there).
        module: what is being run, e.g. ``fsdp_tp``. Only used when `outdir` is None.
        overwrite: a folder that already holds a record loses the record's own files (config.json, the dataset, the
            journal, log.txt, plots, traces, profiles). Checkpoints and other files stay.
        goes_on: a record that is there stays, for `History` to go on with.
        name: of the run: without `outdir` its folder is ``outputs/<module>/<name>``.

    Raises:
        RecordError: the folder holds a record and `overwrite` is off, or it cannot be made or written.
    """
    if outdir is None:
        return writable(_fresh(Path.cwd() / "outputs" / module, name))
    folder = Path(outdir).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"--outdir {folder} is a file, and a run's record is a folder. Give another --outdir.")
    existing = [name for name in _RECORD if os.path.lexists(folder / name)]
    if existing and not overwrite and not goes_on:
        raise RecordError(
            f"--outdir {folder} already holds a run's record ({', '.join(existing)}). "
            "Give another --outdir, leave it out (each run then gets a folder of its own), or pass --overwrite."
        )
    writable(folder)
    if overwrite and not goes_on:
        _remove_record(folder)
    return folder


def write_config(outdir: Path | str, config: Any) -> Path:
    """Write `config` (a mapping or a dataclass, nested as you like) to ``outdir/config.json`` and return the path.

    The file is written atomically. What JSON lacks becomes text: paths, torch dtypes, NaN and infinities, any
    other object by ``str``; dataclasses become mappings, sets sorted lists, enum members their names.

    Raises:
        RecordError: the file cannot be written.
    """
    return write_encoded(outdir, encode(config))


def encode(value: Any) -> str:
    """A value as `write_config` writes it. A large one that stays the same need not be encoded at every write."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def write_encoded(outdir: Path | str, config: str | Mapping[str, str]) -> Path:
    """`write_config` of what has been encoded: in all, or each value by its name."""
    if not isinstance(config, str):
        lines = ",".join(f"\n{json.dumps(name)}: {text}" for name, text in config.items())
        config = "{" + lines.replace("\n", "\n  ") + "\n}"
    path = Path(outdir) / CONFIG
    # A path may have bytes that are no text: to JSON they are escapes.
    write_atomically(path, f"{config}\n".encode("utf-8", "backslashreplace"))
    return path


def versions() -> dict[str, str]:
    """Versions of Python, mmm and the packages a record depends on, read from their metadata: nothing is imported."""
    by_name = {"python": platform.python_version(), "mmm": mmm.__version__}
    for name in _PACKAGES:
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to the disk, then rename it over `path`. RecordError where that fails.

    Whoever could read the file before, or the record that it belongs to, still can. A link that somebody has planted
    beside it, which would lead the content elsewhere, is removed."""
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
    """Give a file, which will be renamed to `path`, the permissions of the one there, or of the record beside it.

    A run may go on under another umask than it began with.
    """
    for name in (path.name, *_RECORD):
        known = path.with_name(name)
        if known.is_file():
            new.chmod(stat.S_IMODE(known.stat().st_mode))
            return


def _not_through_a_link(path: str, flags: int) -> int:
    if os.path.islink(path):
        os.unlink(path)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def cannot_write(path: Path, error: OSError) -> RecordError:
    """The error for a failed write: the path, the reason the OS gave, and the bytes that are free there."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "the free space there is unknown"
    return RecordError(
        f"cannot write {path}: {reason(error)}; {free}. What was written before stays readable. "
        "Free some space or quota, or give an --outdir on another file system."
    )


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _fresh(parent: Path, name: str | None = None) -> Path:
    """A folder under `parent` that did not exist before, named so, or after this second."""
    _make(parent)
    name = name or datetime.now().strftime("%Y-%m-%d-%H%M%S")
    count = 1
    while True:
        folder = parent / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            count += 1
        except OSError as error:
            raise RecordError(f"cannot make {folder}: {reason(error)}. Give an --outdir you may write to.") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_way = next((p for p in [folder, *folder.parents] if p.is_file()), None)
        why = f"{in_way} is a file" if in_way else reason(error)
        raise RecordError(f"cannot make the folder {folder}: {why}. Give an --outdir you may write to.") from error


def writable(folder: Path) -> Path:
    """Make a folder, and check that files can be made in it. RecordError where not."""
    _make(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecordError(f"cannot write to {folder}: {reason(error)}. Give an --outdir you may write to.") from error
    return folder


def trace_of(rank: int | str) -> str:
    """The trace of a rank (``*``: of any), below a run's folder."""
    return f"{TRACES}/rank-{rank}.json.gz"


def own_files(folder: Path) -> list[Path]:
    """The files that a record may have, without the user's files and checkpoints."""
    drawn = [path for pattern in (trace_of("*"), *PLOT_FILES) for path in folder.glob(pattern)]
    inside = [path for path in drawn if path.parent.resolve().is_relative_to(folder.resolve())]  # not by a link
    return [folder / name for name in _OWN] + inside


def _remove_record(folder: Path) -> None:
    """Remove a record's own files. Checkpoints stay: they are costly, and a new run that saves replaces its own."""
    for path in own_files(folder):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RecordError(
                f"--overwrite cannot remove {path}: {reason(error)}. Remove it by hand or give another --outdir."
            ) from error


def remove_new(folder: Path) -> None:
    """Remove what a run has made that is refused before its first row, also the folder, if nothing else is in it."""
    with contextlib.suppress(OSError, RecordError):
        _remove_record(folder)
        for empty in (folder / "checkpoints", folder / TRACES, folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


def _plain(value: Any) -> Any:
    """`value` in JSON's own types."""
    if value is None or (isinstance(value, (str, bool, int)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if type(value).__module__ == "numpy":
        return _plain(value.tolist())
    return str(value)
