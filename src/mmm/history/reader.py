"""Read the record of a run that is finished, running or killed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.errors import RecordError
from mmm.history.alive import why_going_on
from mmm.history.dataset import Columns, read_dataset, to_columns, to_rows, write_dataset
from mmm.history.ending import (
    ENDED,
    FINISHED,
    KILLED,
    RUNNING,
    Ending,
    config_ending,
    config_with,
    parsed,
    read_config,
    read_ending,
    write_ending,
)
from mmm.history.journal import LEFT_OUT, read_journal
from mmm.history.record import DATASET, JOURNAL, reason
from mmm.outside import LARGEST, open_file, parse_json

if TYPE_CHECKING:
    import xarray


def load(outdir: Path | str) -> "xarray.Dataset":
    """Every row of the run in `outdir`, as one dataset in memory. Only reads: a running run is not disturbed.

    Dimension ``draw`` is one a row, ``rank`` one a rank, with the coordinates ``host``, ``local_rank``, ``pid`` and
    ``axis_<mesh axis>`` over it. ``ds.attrs["state"]`` is as of `state`, ``ds.attrs["error"]`` the failure,
    ``ds.attrs["config"]`` config.json's text, and ``ds.attrs["left_out"]`` which lines of the journal were no rows.

    Raises:
        RecordError: no such folder, no record in it, or a file of it is damaged.
    """
    folder = _existing(outdir)
    return dataset_of(folder, _ending_by_journal(folder))


def dataset_of(folder: Path, ending: Ending | None) -> "xarray.Dataset":
    """`load`, of a folder that exists, with that ending; None: the one it has."""
    found, _ = _load(folder, ending)
    return found.dataset() if isinstance(found, Columns) else found


def _load(folder: Path, ending: Ending | None) -> "tuple[Columns | xarray.Dataset, int]":
    """What the journal and the file before it hold, with that ending (None: the one it has), and how many bytes the
    journal has; without a journal the dataset."""
    journal = read_journal(folder / JOURNAL)  # before the dataset: a run that ends meanwhile has written that first
    stored = read_dataset(folder / DATASET)
    if journal is None:
        if stored is None:
            raise _no_record(folder)
        return stored, 0
    header, rows, size, left_out = journal
    if stored is not None:
        rows = to_rows(stored) + rows
    config, ending = read_config(folder), ending or Ending(RUNNING)
    attrs = {"config": config_with(config, ending)} if config else {}
    if left_out := "; ".join(filter(None, (str(header.attrs.get(LEFT_OUT, "")), left_out))):
        attrs[LEFT_OUT] = left_out
    return to_columns(header, rows, ending.attrs() | attrs, _startup(config, len(header.ranks))), size


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
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        if not (folder / DATASET).exists():
            raise _no_record(folder) from None
        return folder / DATASET
    except OSError as error:
        raise RecordError(f"cannot open {path}: {reason(error)}.") from error
    try:
        if why := why_going_on(fd, _writer(path)):
            raise _still_writing(folder, why)
        return finalize_now(folder, _own_word(folder) or Ending(KILLED))
    finally:
        os.close(fd)


def finalize_now(folder: Path, ending: Ending) -> Path:
    """`finalize` where the caller knows that the run is over, and how it ended.

    A journal that has grown since it was read stays beside the dataset, and `load` counts each row once.
    """
    columns, size = _load(folder, ending)
    if isinstance(columns, Columns):  # else another process has made the dataset meanwhile
        write_dataset(columns, folder / DATASET)
    try:
        if (folder / JOURNAL).stat().st_size != size:
            raise _still_writing(folder, f"its journal has grown beyond the {size:,} bytes that were read")
        (folder / JOURNAL).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecordError(f"cannot remove {folder / JOURNAL}: {reason(error)}. Its rows are in {DATASET}.") from error
    write_ending(folder, ending)
    return folder / DATASET


def state(outdir: Path | str) -> str:
    """The state of the run: ``running``, ``finished``, ``interrupted`` (by a signal), ``failed`` or ``killed``.

    The journal's lock distinguishes the first from the last; without locks, the process, if it is on this host, and the
    time of the last write (`mmm.history.alive`).

    Raises:
        RecordError: no such folder, or its dataset is damaged.
    """
    folder = _existing(outdir)
    ending = _ending_by_journal(folder)
    if ending is None:
        dataset = read_dataset(folder / DATASET)
        ending = (read_ending(dataset.attrs) if dataset is not None else None) or _own_word(folder)
    return ending.state if ending else FINISHED  # an older record says nothing


def _ending_by_journal(folder: Path) -> Ending | None:
    """How the run in the folder ended, or that it runs; None without a journal: then the dataset says it."""
    path = folder / JOURNAL
    try:
        fd = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)  # NFS locks what can be written
    except OSError:
        return None
    try:
        if why_going_on(fd, _writer(path)):
            return Ending(RUNNING)
        return _own_word(folder) or Ending(KILLED)
    finally:
        os.close(fd)


def _own_word(folder: Path) -> Ending | None:
    """The ending that the run itself wrote: it may have been killed before its dataset was in place."""
    ending = config_ending(read_config(folder))
    return ending if ending is not None and ending.state in ENDED else None


def _writer(path: Path) -> Mapping[str, Any]:
    """Which process writes the journal; empty where that is not known."""
    try:
        with open_file(path) as file:
            writer = parse_json(file.readline(LARGEST)).get("writer")
        return writer if isinstance(writer, dict) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _still_writing(folder: Path, why: str) -> RecordError:
    return RecordError(
        f"the run in {folder} is still writing ({why}): it makes {DATASET} itself when it ends. "
        "Until then mmm.history.load and `mmm history` read it as it is."
    )


def _existing(outdir: Path | str) -> Path:
    folder = Path(outdir).expanduser()
    if not folder.is_dir():
        what = "is a file, and a run's record is a folder" if folder.exists() else "does not exist"
        raise RecordError(f"{folder} {what}. Give the folder of a run, e.g. outputs/<module>/<timestamp>.")
    return folder


def _no_record(folder: Path) -> RecordError:
    inside = sorted(p.name for p in folder.iterdir())
    shown = ", ".join(inside[:8]) + (", …" if len(inside) > 8 else "") if inside else "nothing"
    return RecordError(
        f"{folder} holds no run's record: neither {DATASET} nor {JOURNAL} is in it, but {shown}. "
        "Give the folder of one run, e.g. outputs/<module>/<timestamp>."
    )


def _startup(config: str, ranks: int) -> dict[str, list[float | None]]:
    """The marks of each rank's start-up, by name; empty before the first step has ended."""
    try:
        marks = parsed(config)["startup"]["marks"]
        number = (float, int, type(None))
        return {name: at for name, at in marks.items() if len(at) <= ranks and all(type(x) in number for x in at)}
    except (KeyError, TypeError, AttributeError):
        return {}  # a user may edit config.json; the rows do not depend on it
