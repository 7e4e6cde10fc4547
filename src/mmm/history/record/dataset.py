"""Turns rows into a labelled dataset, writes and reads the dataset's file, and turns a journal into a dataset.

xarray is imported where it is used: pandas comes with it, and both together take as long to import as a third of
PyTorch.

The dimensions are ``draw``, one entry for each logged row, and ``rank``. Along ``rank`` lie the coordinates ``host``,
``local_rank``, ``pid``, and for each mesh axis ``axis_<name>`` (``axis_tp``, ``axis_dp_shard``, …), as in
``ds.dt.where(ds.axis_tp == 0, drop=True)``. ``draw`` is the name of the row dimension in the records that this format
is compatible with.
"""

import io
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.ending import RUNNING, Ending, config_text, write_ending
from mmm.history.record.folder import DAMAGED, DATASET, JOURNAL, reason, write_atomically
from mmm.history.record.journal import LEFT_OUT, JournalContents, LoggedRow, read_journal
from mmm.outside import check_heaps, open_file, parse_json

if TYPE_CHECKING:
    import xarray

log = logging.getLogger("mmm")
INT64 = np.iinfo(np.int64)

# Attribute of the dataset that lists the resumptions: mappings with ``draw``, the first row after the resumption.
MARKS = "resumed"

# Name of a variable → its long name, and its unit or "".
_ABOUT = {
    "iter": ("optimizer step", ""),
    "epoch": ("epoch", ""),
    "loss": ("training loss", ""),
    "train_loss": ("training loss", ""),
    "val_loss": ("validation loss", ""),
    "test_loss": ("test loss", ""),
    "test_acc": ("test accuracy", "%"),
    "dt": ("time of a step", "s"),
    "dt_own": ("time of a step without waiting for other ranks", "s"),
    "dtd": ("time for data", "s"),
    "dtf": ("forward time", "s"),
    "dtb": ("backward time", "s"),
    "dto": ("optimizer time", "s"),
    "dtw": ("waiting time", "s"),
    "sps": ("samples per second", "samples/s"),
    "tps": ("tokens per second", "tokens/s"),
    "lr": ("learning rate", ""),
    "grad_norm": ("gradient norm", ""),
    "val_bpb": ("validation loss per byte", "bit/byte"),
    "sps_per_gpu": ("samples per second of a rank", "samples/s"),
    "tps_per_gpu": ("tokens per second of a rank", "tokens/s"),
    "mfu": ("model FLOPs utilisation, a part of the devices' peak", ""),
    "skipped": ("steps that were skipped since the last row", ""),
}
# Variables that were reduced over ranks, such as dt_max.
_REDUCED = re.compile(r"(.+)_(min|median|max|argmax)$")
_OVER = {"min": "smallest over ranks", "median": "median over ranks", "max": "largest over ranks"}


def about(name: str) -> dict[str, str]:
    """Return the attributes of the variable `name`: ``long_name`` and, if it has a unit, ``units``."""
    base = name
    reduction = ""
    match = _REDUCED.match(name)
    if match and name not in _ABOUT:
        base, reduction = match.groups()
    if reduction == "argmax":
        return {"long_name": f"rank with the largest {base}"}
    long_name, unit = _ABOUT.get(base, (base, ""))
    if reduction:
        long_name += f", {_OVER[reduction]}"
    # A program's own variable, such as dt_gather, has the unit of the one that its name begins with.
    prefix = base.partition("_")[0]
    if not unit and prefix in ("dt", "sps", "tps"):
        unit = _ABOUT[prefix][1]
    attrs = {"long_name": long_name}
    if unit:
        attrs["units"] = unit
    return attrs


def is_known(name: str) -> bool:
    """Whether a column has one of the names that this package describes, and that many programs use."""
    return name in _ABOUT


def legend(names: Iterable[str]) -> str:
    """Explain a row's columns, a line for each whose description says more than its name."""
    lines = ["a row's columns"]
    for name in names:
        attrs = about(name)
        long_name = attrs["long_name"]
        if long_name == name:
            continue
        line = f"  {name:<12} {long_name}"
        if "units" in attrs:
            line += f", {attrs['units']}"
        lines.append(line)
    return "\n".join(lines)


def to_dataset(
    ranks: Sequence[Mapping[str, Any]],
    attrs: Mapping[str, Any],
    rows: Iterable[LoggedRow],
) -> "xarray.Dataset":
    """Make one dataset of all rows.

    A missing value is NaN. A column that only has ints is int64, any other float64. If a column is scalar in some rows
    and by rank in others, the scalars count as rank 0's.

    Args:
        ranks: name → value of the coordinates of each rank.
        attrs: attributes of the dataset.
        rows: the rows, in any order.
    """
    import xarray

    # A draw that is both in the dataset and in the journal counts once.
    by_draw = {row.draw: row for row in rows}
    draws = sorted(by_draw)
    logged = [by_draw[draw] for draw in draws]
    # The names of variables, in the order in which they first appear.
    scalars = dict.fromkeys(name for row in logged for name in row.row)
    spread = dict.fromkeys(name for row in logged for name in row.per_rank)
    variables: dict[str, Any] = {}
    for name in scalars | spread:
        if name not in spread:
            column = [row.row.get(name, math.nan) for row in logged]
            variables[name] = ("draw", _numbers(column), about(name))
            continue
        # (draw, rank)
        table = []
        for row in logged:
            values = row.per_rank.get(name) or [row.row.get(name, math.nan)]
            # A run may have been resumed with fewer ranks.
            missing = len(ranks) - len(values)
            table.append([*values, *[math.nan] * missing])
        variables[name] = (("draw", "rank"), _numbers(table), about(name))

    coordinates: dict[str, Any] = {
        "draw": ("draw", np.array(draws, dtype=np.int64), {"long_name": "logged row"}),
        "rank": ("rank", np.arange(len(ranks)), {"long_name": "rank"}),
    }
    # HDF5 arrays have one type: integers if all ranks have integers, else text.
    for name in dict.fromkeys(key for rank in ranks for key in rank):
        numbers_by_rank = [rank.get(name, -1) for rank in ranks]
        if all(map(_is_int64, numbers_by_rank)):
            coordinates[name] = ("rank", np.array(numbers_by_rank, dtype=np.int64))
        else:
            texts = [_plain_text(str(rank.get(name, ""))) for rank in ranks]
            coordinates[name] = ("rank", np.array(texts))
    plain_attrs = {str(name): _plain_attr(value) for name, value in attrs.items()}
    return xarray.Dataset(variables, coordinates, plain_attrs)


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """Make an array of int64 if all values are whole numbers, else of float64."""
    array = np.array(values)
    return array if array.dtype == np.int64 else array.astype(np.float64)


def _is_int64(value: object) -> bool:
    return type(value) is int and INT64.min <= value <= INT64.max


def _plain_attr(value: Any) -> str | int | float:
    """Convert an attribute to text, int or float, which every HDF5 reader knows; anything else becomes JSON text."""
    if type(value) is float or _is_int64(value):
        return value
    return _plain_text(value if type(value) is str else json.dumps(value, default=str))


def _plain_text(text: str) -> str:
    """A text that HDF5 can hold: the bytes of a path that are not text, and NULs, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def to_rows(dataset: "xarray.Dataset") -> list[LoggedRow]:
    """Return the rows of a dataset: the inverse of `to_dataset`, except that values which a row lacked are NaN."""
    # Name → the variable as lists, one entry for each row.
    scalars: dict[str, list[Any]] = {}
    spread: dict[str, list[Any]] = {}
    for name, variable in dataset.data_vars.items():
        columns = scalars if variable.ndim == 1 else spread
        columns[str(name)] = variable.values.tolist()
    rows = []
    for index, draw in enumerate(dataset["draw"].values.tolist()):
        row = {name: column[index] for name, column in scalars.items()}
        per_rank = {name: column[index] for name, column in spread.items()}
        rows.append(LoggedRow(draw, row, per_rank))
    return rows


def write_dataset(dataset: "xarray.Dataset", path: Path) -> None:
    """Write a dataset to `path` as netCDF-4/HDF5, atomically. The file is the one that xarray would write.

    The file is made in memory: so HDF5 needs no lock of a parallel file system, and cannot meet a disk that fills up.

    Raises:
        RecordError: the file cannot be written.
    """
    import h5netcdf
    from xarray.backends.h5netcdf_ import H5NetCDFStore

    buffer = io.BytesIO()
    # Without a fill value, because NaN is a value here.
    encoding = {name: {"_FillValue": None} for name in dataset.variables}
    # As `dataset.to_netcdf` does it, which in an older xarray writes to a buffer with scipy alone.
    with h5netcdf.File(buffer, "w") as file:
        dataset.dump_to_store(H5NetCDFStore(file), encoding=encoding)
    write_atomically(path, buffer.getvalue())


def read_dataset(path: Path) -> "xarray.Dataset | None":
    """Read the dataset at `path` into memory; None if there is no such file.

    Raises:
        RecordError: the file cannot be read, or is not a run's dataset.
    """
    try:
        with open_file(path) as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}.") from error
    import xarray

    try:
        check_heaps(content)
        dataset = xarray.load_dataset(io.BytesIO(content), engine="h5netcdf")
        # KeyError if one of them is missing.
        dataset["draw"], dataset["rank"]
        for name, variable in dataset.data_vars.items():
            if variable.dims not in (("draw",), ("draw", "rank")):
                raise ValueError(f"{name} has the dimensions {variable.dims}")
    except Exception as error:
        # HDF5 and its two wrappers raise OSError, KeyError, RuntimeError, ValueError, …
        raise RecordError(
            f"{path} ({len(content):,} bytes) is not a run's dataset or is damaged: {error}. "
            "Restore it from a copy, or move it away to read what the journal holds."
        ) from error
    # The encoding tells how the file was written: whoever writes the dataset again chooses anew.
    for column in dataset.variables.values():
        column.encoding.clear()
    return dataset


def marks_of(ds: "xarray.Dataset") -> list[dict[str, Any]]:
    """Return the resumptions of a run: mappings, each with ``draw``, the first row after the resumption."""
    try:
        marks = parse_json(ds.attrs.get(MARKS, "[]"), list)
        return [mark for mark in marks if isinstance(mark.get("draw"), int)]
    except (ValueError, TypeError, AttributeError):
        return []


class Joined(NamedTuple):
    """A run's rows as one dataset.

    Attributes:
        dataset: all rows.
        journal: the content of the run's journal; None if there is no journal, and all rows come from the dataset's
            file.
    """

    dataset: "xarray.Dataset"
    journal: JournalContents | None


def join(folder: Path, ending: Ending | None) -> Joined:
    """Join the rows of a run's journal with those of its dataset's file.

    Args:
        folder: the run's folder.
        ending: how the run has ended; None: it is still running.

    Raises:
        RecordError: there is neither file, or one is damaged.
    """
    # The journal is read first: a run that ends meanwhile writes the dataset before it removes the journal.
    journal = read_journal(folder / JOURNAL)
    stored = read_dataset(folder / DATASET)
    if journal is None:
        if stored is None:
            raise no_record(folder)
        return Joined(stored, None)
    header = journal.header
    rows = journal.rows
    if stored is not None:
        rows = to_rows(stored) + rows
    ending = ending or Ending(RUNNING)
    attrs = header.attrs | ending.attrs()
    config = config_text(folder, ending)
    if config:
        attrs["config"] = config
    # The header has what an earlier run of this record has left out.
    left_out = []
    for text in (header.attrs.get(LEFT_OUT), journal.left_out):
        if text:
            left_out.append(str(text))
    if left_out:
        attrs[LEFT_OUT] = "; ".join(left_out)
    dataset = to_dataset(header.ranks, attrs, rows)
    return Joined(dataset, journal)


def finalize_now(folder: Path, ending: Ending) -> Path:
    """Make the dataset of a run that is known to be over, remove its journal, and return the dataset's path.

    If the journal has grown since it was read, it stays next to the dataset, and `load` counts each row once. If it
    could not be read to its end, it is renamed to `DAMAGED`.

    Args:
        folder: the run's folder.
        ending: how the run has ended.

    Raises:
        RecordError: a file is damaged or cannot be written, or the run still writes.
    """
    dataset, journal = join(folder, ending)
    path = folder / JOURNAL
    # Without a journal, another process has made the dataset meanwhile.
    if journal is not None:
        write_dataset(dataset, folder / DATASET)
        try:
            if path.stat().st_size != journal.size:
                raise still_writing(folder, f"its journal has grown beyond the {journal.size:,} bytes that were read")
            if journal.left_out:
                path.replace(folder / DAMAGED)
            else:
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RecordError(f"cannot remove {path}: {reason(error)}. Its rows are in {DATASET}.") from error
    try:
        write_ending(folder, ending)
    except RecordError as error:
        # The disk may be full. The dataset has the ending as well.
        log.warning("%s", error)
    return folder / DATASET


def still_writing(folder: Path, why: str) -> RecordError:
    """Make the error for a run that cannot be finalized because it still writes."""
    return RecordError(
        f"the run in {folder} is still writing ({why}): it makes {DATASET} itself when it ends. "
        "Until then mmm.history.load and `mmm history` read it as it is."
    )


def no_record(folder: Path) -> RecordError:
    """Make the error for a folder that holds no record. It names some of the files that are there."""
    names = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(names[:8]) or "nothing"
    if len(names) > 8:
        listed += ", …"
    return RecordError(
        f"{folder} holds no run's record: neither {DATASET} nor {JOURNAL} is in it, but {listed}. "
        "Give the folder of one run, e.g. outputs/<module>/<timestamp>."
    )
