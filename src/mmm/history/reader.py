"""Read a run's record, whatever became of the run: finished, running or killed."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.dataset import read_dataset, to_dataset, to_rows, write_dataset
from mmm.history.journal import lock, read_journal
from mmm.history.record import CONFIG, DATASET, JOURNAL, reason

if TYPE_CHECKING:
    import xarray


def load(outdir: Path | str) -> "xarray.Dataset":
    """Every kept row of the run in `outdir`, as one dataset in memory. Reads only: a running run is not disturbed.

    Dimension ``draw`` is one a row, ``rank`` one a rank, with the coordinates ``host``, ``local_rank``, ``pid`` and
    ``axis_<mesh axis>`` over it. ``ds.attrs["config"]`` is config.json's text.

    Raises:
        RecordError: no such folder, no record in it, or a file of it is damaged.
    """
    folder = _existing(outdir)
    journal = read_journal(folder / JOURNAL)  # before the dataset: a run that ends meanwhile has written that first
    stored = read_dataset(folder / DATASET)
    if journal is None:
        if stored is None:
            raise _no_record(folder)
        return stored
    header, rows = journal
    if stored is not None:
        rows = to_rows(stored) + rows
    config = _config(folder)
    return to_dataset(header, rows, {"config": config} if config else {}, _startup(config, len(header.ranks)))


def fold(outdir: Path | str) -> Path:
    """Make train_dataset.h5 from what a killed run left, remove its journal, and return the dataset's path.

    A folder whose dataset is there already, and no journal, is left as it is.

    Raises:
        RecordError: as `load`; the run is still writing; or the dataset cannot be written, and then the journal stays.
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
        if not lock(fd):
            raise RecordError(
                f"the run in {folder} is still writing: it makes {DATASET} itself when it ends. "
                "Until then mmm.history.load and `mmm history` read it as it is."
            )
        return fold_now(folder)
    finally:
        os.close(fd)


def fold_now(folder: Path) -> Path:
    """`fold` for who already holds the journal's lock."""
    write_dataset(load(folder), folder / DATASET)
    (folder / JOURNAL).unlink(missing_ok=True)
    return folder / DATASET


def state(outdir: Path | str) -> str:
    """What became of the run: ``finished``, ``running`` or ``killed``. Best effort: locks say which of the last two."""
    path = _existing(outdir) / JOURNAL
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return "finished"
    try:
        return "killed" if lock(fd) else "running"
    finally:
        os.close(fd)


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


def _config(folder: Path) -> str:
    try:
        return (folder / CONFIG).read_text()
    except OSError:
        return ""  # a record may have none


def _startup(config: str, ranks: int) -> dict[str, list[float | None]]:
    """When each rank was started, and so on, by mark; nothing before the first step has ended."""
    try:
        marks = json.loads(config or "{}").get("startup", {}).get("marks", {})
        return {str(name): at for name, at in marks.items() if len(at) == ranks}
    except (ValueError, TypeError, AttributeError):
        return {}  # config.json is anyone's to write; the rows do not depend on it
