"""Reads the record of a run, whether it is finished, running or killed."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mmm.errors import RecordError
from mmm.history.record.dataset import finalize_now, join, no_record, still_writing
from mmm.history.record.ending import ENDED, FINISHED, KILLED, RUNNING, Ending, read_config, read_ending
from mmm.history.record.folder import DATASET, JOURNAL, reason
from mmm.outside import LARGEST, Lock, lock, open_file, parse_json

if TYPE_CHECKING:
    import xarray

# Seconds without a write, after which a run counts as over if its journal's lock does not tell.
RECENT = 15 * 60.0

# Seconds in which other readers, which only look for a moment, release the journal's lock.
READERS = 5.0


def why_running(folder: Path) -> str:
    """Say why the run in a folder counts as running; empty if it is over.

    The journal's lock tells: a run that writes holds it exclusively, readers share it. Without locks, the file's age
    tells.

    Raises:
        OSError: there is no journal that can be opened.
    """
    with open_file(folder / JOURNAL) as file:
        answer = lock(file.fileno(), shared=True)
        if answer is Lock.TAKEN:
            return "another process holds its journal's lock"
        age = time.time() - os.fstat(file.fileno()).st_mtime
        writer = _writer(file)
    lock_tells = answer is Lock.LOCKED and writer.get("locks", True)
    if lock_tells or age >= RECENT:
        return ""
    if answer is Lock.NONE:
        without = "this file system has no locks"
    else:
        without = "the run has found no locks where it writes"
    by_process = ""
    if "pid" in writer and "host" in writer:
        by_process = f" by process {writer['pid']} on {writer['host']}"
    return (
        f"{without}, and the journal was written {max(age, 0):.0f} s ago{by_process}: "
        f"only after {RECENT / 60:.0f} minutes without a write does the run count as over"
    )


def _writer(file: BinaryIO) -> Mapping[str, Any]:
    """Read from a journal's header which process writes it, and whether that has found locks; may be empty."""
    try:
        writer = parse_json(file.readline(LARGEST)).get("writer")
    except (OSError, ValueError):
        return {}
    return writer if isinstance(writer, dict) else {}


def load(outdir: Path | str) -> "xarray.Dataset":
    """Read every row of the run in `outdir` into one dataset in memory. A running run is not disturbed.

    The dimension ``draw`` has one entry for each row, and ``rank`` one for each rank, with the coordinates ``host``,
    ``local_rank``, ``pid`` and ``axis_<mesh axis>``. ``ds.attrs["state"]`` is the run's state (see `state`),
    ``ds.attrs["error"]`` its failure, ``ds.attrs["config"]`` the text of config.json, and ``ds.attrs["left_out"]``
    tells which lines of the journal were not rows.

    Args:
        outdir: the run's folder.

    Raises:
        RecordError: there is no such folder, no record in it, or a file of the record is damaged.
    """
    folder = _existing(outdir)
    return dataset_of(folder, ending_by_journal(folder))


def dataset_of(folder: Path, ending: Ending | None) -> "xarray.Dataset":
    """Read every row of the run in a folder that exists.

    Args:
        folder: the run's folder.
        ending: how the run has ended, if it has a journal; None: the ending is in the dataset's file.
    """
    return join(folder, ending).dataset


def finalize(outdir: Path | str) -> Path:
    """Make train_dataset.h5 from a killed run's journal, remove the journal, and return the dataset's path.

    A folder with a dataset and without a journal is left as it is.

    Args:
        outdir: the run's folder.

    Raises:
        RecordError: as in `load`; or the run is, or may be, still writing; or the dataset cannot be written, and then
            the journal stays.
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
        # An exclusive lock: if two processes finalize one record, the second finds the dataset.
        while lock(descriptor) is Lock.TAKEN:
            if time.monotonic() > deadline:
                raise still_writing(folder, "other processes hold its journal's lock")
            time.sleep(0.01)
        return finalize_now(folder, recorded_state(folder) or Ending(KILLED))
    finally:
        os.close(descriptor)


def state(outdir: Path | str) -> str:
    """Return the state of a run: ``running``, ``finished``, ``interrupted`` (by a signal), ``failed`` or ``killed``.

    The journal's lock tells whether a run is running or was killed; without locks, the time of the last write does.

    Args:
        outdir: the run's folder.

    Raises:
        RecordError: as in `load`.
    """
    # Older records do not tell their state.
    ending = read_ending(load(outdir).attrs) or Ending(FINISHED)
    return ending.state


def ending_by_journal(folder: Path) -> Ending | None:
    """Tell how the run in a folder ended, or that it runs; None without a journal: then the dataset tells."""
    try:
        why = why_running(folder)
    except OSError:
        return None
    if why:
        return Ending(RUNNING)
    return recorded_state(folder) or Ending(KILLED)


def recorded_state(folder: Path) -> Ending | None:
    """Return the ending that the run itself wrote into config.json, if it came to that.

    A run may be killed after that and before its dataset is in place.
    """
    ending = read_ending(read_config(folder))
    if ending is None or ending.state not in ENDED:
        return None
    return ending


def _existing(outdir: Path | str) -> Path:
    folder = Path(outdir).expanduser()
    if not folder.is_dir():
        problem = "is a file, and a run's record is a folder" if folder.exists() else "does not exist"
        raise RecordError(f"{folder} {problem}. Give the folder of a run, e.g. outputs/<module>/<timestamp>.")
    return folder
