"""Read the record of a run that is finished, running or killed."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mmm.errors import RecordError
from mmm.history.record.dataset import finalize_now, join, no_record, read_dataset, still_writing
from mmm.history.record.ending import ENDED, FINISHED, KILLED, RUNNING, Ending, read_config, read_ending
from mmm.history.record.folder import DATASET, JOURNAL, reason
from mmm.outside import LARGEST, Lock, lock, open_file, parse_json

if TYPE_CHECKING:
    import xarray

RECENT = 15 * 60.0  # s without a write after which a run without lock and process counts as over
READERS = 5.0  # s in which other readers, who look for a moment only, let go of the journal


def why_running(folder: Path) -> str:
    """Say why the run in a folder counts as running; empty: it is over.

    The journal's lock says it: a run that writes has it alone, readers share it. Without locks, the file's age.

    Raises:
        OSError: there is no journal that can be opened.
    """
    path = folder / JOURNAL
    with open_file(path) as file:
        answer = lock(file.fileno(), shared=True)
        if answer is Lock.TAKEN:
            return "another process holds its journal's lock"
        age = time.time() - os.fstat(file.fileno()).st_mtime
        writer = _writer(file)
    if (answer is Lock.LOCKED and writer.get("locks", True)) or age >= RECENT:
        return ""
    without = "this file system has no locks" if answer is Lock.NONE else "the run has found no locks where it writes"
    where = f" by process {writer['pid']} on {writer['host']}" if {"pid", "host"} <= writer.keys() else ""
    return (
        f"{without}, and the journal was written {max(age, 0):.0f} s ago{where}: "
        f"only after {RECENT / 60:.0f} minutes without a write does the run count as over"
    )


def _writer(file: BinaryIO) -> Mapping[str, Any]:
    """What a journal's header says of the process that writes it, and whether that has found locks; may be empty."""
    try:
        writer = parse_json(file.readline(LARGEST)).get("writer")
    except (OSError, ValueError):
        return {}
    return writer if isinstance(writer, dict) else {}


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
    return join(folder, ending).dataset


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
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except FileNotFoundError:
        if not (folder / DATASET).exists():
            raise no_record(folder) from None
        return folder / DATASET
    except OSError as error:
        raise RecordError(f"cannot open {path}: {reason(error)}.") from error
    try:
        why = why_running(folder)
        if why:
            raise still_writing(folder, why)
        deadline = time.monotonic() + READERS
        while lock(descriptor) is Lock.TAKEN:  # alone: of two processes that finalize it, the second finds the dataset
            if time.monotonic() > deadline:
                raise still_writing(folder, "other processes hold its journal's lock")
            time.sleep(0.01)
        return finalize_now(folder, recorded_state(folder) or Ending(KILLED))
    finally:
        os.close(descriptor)


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
        if dataset is not None:
            ending = read_ending(dataset.attrs)
    ending = ending or recorded_state(folder)
    return ending.state if ending else FINISHED  # an older record says nothing


def ending_by_journal(folder: Path) -> Ending | None:
    """How the run in the folder ended, or that it runs; None without a journal: then the dataset says it."""
    try:
        why = why_running(folder)
    except OSError:
        return None
    return Ending(RUNNING) if why else recorded_state(folder) or Ending(KILLED)


def recorded_state(folder: Path) -> Ending | None:
    """The ending that the run itself wrote: it may have been killed before its dataset was in place."""
    ending = read_ending(read_config(folder))
    return ending if ending is not None and ending.state in ENDED else None


def _existing(outdir: Path | str) -> Path:
    folder = Path(outdir).expanduser()
    if not folder.is_dir():
        problem = "is a file, and a run's record is a folder" if folder.exists() else "does not exist"
        raise RecordError(f"{folder} {problem}. Give the folder of a run, e.g. outputs/<module>/<timestamp>.")
    return folder
