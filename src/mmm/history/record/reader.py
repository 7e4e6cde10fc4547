"""Read the record of a run that is finished, running or killed."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.errors import RecordError
from mmm.history.record.dataset import Columns, finalize_now, join, no_record, read_dataset, still_writing
from mmm.history.record.ending import (
    ENDED,
    FINISHED,
    KILLED,
    RUNNING,
    Ending,
    config_ending,
    read_config,
    read_ending,
)
from mmm.history.record.folder import DATASET, JOURNAL, reason
from mmm.outside import LARGEST, Lock, lock, open_file, parse_json

if TYPE_CHECKING:
    import xarray

RECENT = 15 * 60.0  # s without a write after which a run without lock and process counts as over
READERS = 5.0  # s in which other readers, who look for a moment only, let go of the journal


def why_running(fd: int, writer: Mapping[str, Any]) -> str | None:
    """Why the run whose journal is open as `fd` counts as running; None: it is over.

    The lock says it; without locks, the file's age. Until `fd` is closed it is held, shared with other
    readers: a run that writes has it alone.

    Args:
        writer: what the journal's header says of its process, and whether that process found locks (``locks``); may be
            empty.
    """
    answer = lock(fd, shared=True)
    if answer is Lock.TAKEN:
        return "another process holds its journal's lock"
    if answer is Lock.LOCKED and writer.get("locks", True):
        return None
    without = "this file system has no locks" if answer is Lock.NONE else "the run has found no locks where it writes"
    age = time.time() - os.fstat(fd).st_mtime
    if age < RECENT:
        where = f" by process {writer['pid']} on {writer['host']}" if {"pid", "host"} <= writer.keys() else ""
        return (
            f"{without}, and the journal was written {max(age, 0):.0f} s ago{where}: "
            f"only after {RECENT / 60:.0f} minutes without a write does the run count as over"
        )
    return None


def load(outdir: Path | str) -> "xarray.Dataset":
    """Every row of the run in `outdir`, as one dataset in memory. Only reads: a running run is not disturbed.

    Dimension ``draw`` is one a row, ``rank`` one a rank, with the coordinates ``host``, ``local_rank``, ``pid`` and
    ``axis_<mesh axis>`` over it. ``ds.attrs["state"]`` is as of `state`, ``ds.attrs["error"]`` the failure,
    ``ds.attrs["config"]`` config.json's text, and ``ds.attrs["left_out"]`` which lines of the journal were no rows.

    Raises:
        RecordError: no such folder, no record in it, or a file of it is damaged.
    """
    folder = _existing(outdir)
    return dataset_of(folder, ending_by_journal(folder))


def dataset_of(folder: Path, ending: Ending | None) -> "xarray.Dataset":
    """`load`, of a folder that exists, with that ending; None: the one it has."""
    joined, _, _ = join(folder, ending)
    return joined.dataset() if isinstance(joined, Columns) else joined


def finalize(outdir: Path | str) -> Path:
    """Make train_dataset.h5 from a killed run's journal, remove the journal, and return the dataset's path.

    A folder with a dataset and without a journal is left as it is.

    Raises:
        RecordError: as `load`; the run is still writing, or may be; or the dataset cannot be written, and then the
            journal stays.
    """
    folder = _existing(outdir)
    path = folder / JOURNAL
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except FileNotFoundError:
        if not (folder / DATASET).exists():
            raise no_record(folder) from None
        return folder / DATASET
    except OSError as error:
        raise RecordError(f"cannot open {path}: {reason(error)}.") from error
    try:
        if why := why_running(fd, journal_writer(path)):
            raise still_writing(folder, why)
        deadline = time.monotonic() + READERS
        while lock(fd) is Lock.TAKEN:  # alone: of two processes that finalize it, the second finds the dataset
            if time.monotonic() > deadline:
                raise still_writing(folder, "other processes hold its journal's lock")
            time.sleep(0.01)
        return finalize_now(folder, recorded_state(folder) or Ending(KILLED))
    finally:
        os.close(fd)


def state(outdir: Path | str) -> str:
    """The state of the run: ``running``, ``finished``, ``interrupted`` (by a signal), ``failed`` or ``killed``.

    The journal's lock distinguishes the first from the last; without locks, the time of the last write.

    Raises:
        RecordError: no such folder, or its dataset is damaged.
    """
    folder = _existing(outdir)
    ending = ending_by_journal(folder)
    if ending is None:
        dataset = read_dataset(folder / DATASET)
        ending = (read_ending(dataset.attrs) if dataset is not None else None) or recorded_state(folder)
    return ending.state if ending else FINISHED  # an older record says nothing


def ending_by_journal(folder: Path) -> Ending | None:
    """How the run in the folder ended, or that it runs; None without a journal: then the dataset says it."""
    path = folder / JOURNAL
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if why_running(fd, journal_writer(path)):
            return Ending(RUNNING)
        return recorded_state(folder) or Ending(KILLED)
    finally:
        os.close(fd)


def recorded_state(folder: Path) -> Ending | None:
    """The ending that the run itself wrote: it may have been killed before its dataset was in place."""
    ending = config_ending(read_config(folder))
    return ending if ending is not None and ending.state in ENDED else None


def journal_writer(path: Path) -> Mapping[str, Any]:
    """Which process writes the journal; empty where that is not known."""
    try:
        with open_file(path) as file:
            writer = parse_json(file.readline(LARGEST)).get("writer")
        return writer if isinstance(writer, dict) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _existing(outdir: Path | str) -> Path:
    folder = Path(outdir).expanduser()
    if not folder.is_dir():
        what = "is a file, and a run's record is a folder" if folder.exists() else "does not exist"
        raise RecordError(f"{folder} {what}. Give the folder of a run, e.g. outputs/<module>/<timestamp>.")
    return folder
