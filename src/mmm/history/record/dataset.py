"""Rows to a labelled dataset, the dataset to and from its file, and a journal to a dataset.

xarray is imported where it is used: pandas comes with it, and both together take as long to import as a third of
PyTorch.

Dimensions: ``draw``, one a logged row, and ``rank``. Over ``rank`` lie the coordinates ``host``, ``local_rank``,
``pid``, for each mesh axis ``axis_<name>`` (``axis_tp``, ``axis_dp_shard``, …), as in
``ds.dt.where(ds.axis_tp == 0, drop=True)``, and the marks of each rank's start-up, ``startup_<mark>``
(`mmm.runtime.startup`). ``draw`` is the name of the row dimension in the records that this format is compatible with.
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
from mmm.history.record.ending import RUNNING, Ending, config_text, read_config, write_ending
from mmm.history.record.folder import DAMAGED, DATASET, JOURNAL, reason, write_atomically
from mmm.history.record.journal import LEFT_OUT, JournalContents, LoggedRow, read_journal
from mmm.outside import check_heaps, open_file, parse_json

if TYPE_CHECKING:
    import xarray

log = logging.getLogger("mmm")
INT64 = np.iinfo(np.int64)
MARKS = "resumed"  # the dataset's attribute: a list of mappings, with draw, the first row after the resumption

_ABOUT = {  # name: (what it is, its unit or "")
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
_REDUCED = re.compile(r"(.+)_(min|median|max|argmax)$")
_OVER = {"min": "smallest over ranks", "median": "median over ranks", "max": "largest over ranks"}


def about(name: str) -> dict[str, str]:
    """Attributes of the variable `name`: ``long_name`` and, where known, ``units``."""
    reduced = None if name in _ABOUT else _REDUCED.match(name)
    base, over = reduced.groups() if reduced else (name, "")
    if over == "argmax":
        return {"long_name": f"rank with the largest {base}"}
    long_name, unit = _ABOUT.get(base, (base, ""))
    if over:
        long_name += f", {_OVER[over]}"
    prefix = base.partition("_")[0]
    if not unit and prefix in ("dt", "sps", "tps"):  # such as dt_gather
        unit = _ABOUT[prefix][1]
    attrs = {"long_name": long_name}
    if unit:
        attrs["units"] = unit
    return attrs


def is_known(name: str) -> bool:
    """Whether a column is one of those that many programs have, by a name of ours."""
    return name in _ABOUT


def legend(names: Iterable[str]) -> str:
    """A line for each of a row's columns that has more to say than its name."""
    lines = []
    for name in names:
        attrs = about(name)
        unit = f", {attrs['units']}" if "units" in attrs else ""
        if attrs["long_name"] != name:
            lines.append(f"  {name:<12} {attrs['long_name']}{unit}")
    return "\n".join(["a row's columns", *lines])


def to_dataset(
    ranks: Sequence[Mapping[str, Any]], attrs: Mapping[str, Any], rows: Iterable[LoggedRow], config: Mapping[str, Any]
) -> "xarray.Dataset":
    """Make one dataset of all rows. A missing value is NaN; a column of ints alone is int64, any other float64.

    A scalar in a column that other rows have by rank is rank 0's.

    Args:
        ranks: coordinates of each rank, by name.
        config: config.json, which has the marks of each rank's start-up.
    """
    import xarray

    by_draw = {row.draw: row for row in rows}  # a draw that is in dataset and journal counts once
    logged = [by_draw[draw] for draw in sorted(by_draw)]
    scalars = dict.fromkeys(name for row in logged for name in row.row)
    spread = dict.fromkeys(name for row in logged for name in row.per_rank)
    variables: dict[str, Any] = {}
    for name in scalars | spread:
        if name not in spread:
            column = [row.row.get(name, math.nan) for row in logged]
            variables[name] = ("draw", _numbers(column), about(name))
            continue
        table = []  # (draw, rank)
        for row in logged:
            values = row.per_rank.get(name) or [row.row.get(name, math.nan)]
            # A run may have gone on with fewer ranks.
            table.append([*values, *[math.nan] * (len(ranks) - len(values))])
        variables[name] = (("draw", "rank"), _numbers(table), about(name))

    coordinates: dict[str, Any] = {
        "draw": ("draw", np.array(sorted(by_draw), dtype=np.int64), {"long_name": "logged row"}),
        "rank": ("rank", np.arange(len(ranks)), {"long_name": "rank"}),
    }
    for name in dict.fromkeys(key for place in ranks for key in place):
        if all(_is_int64(place.get(name, -1)) for place in ranks):
            coordinates[name] = ("rank", np.array([place.get(name, -1) for place in ranks], dtype=np.int64))
        else:
            coordinates[name] = ("rank", np.array([str(place.get(name, "")) for place in ranks]))
    for name, seconds in startup_marks(config, len(ranks)).items():
        text = f"start-up: {name.replace('_', ' ')}, seconds of 1970's epoch"
        times = np.full(len(ranks), np.nan)
        times[: len(seconds)] = seconds
        coordinates[f"startup_{name}"] = ("rank", times, {"long_name": text, "units": "s"})
    return xarray.Dataset(variables, coordinates, {str(name): _plain_attr(value) for name, value in attrs.items()})


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """An array of int64 where all are whole numbers, else of float64."""
    array = np.array(values)
    return array if array.dtype == np.int64 else array.astype(np.float64)


def _is_int64(value: object) -> bool:
    return type(value) is int and INT64.min <= value <= INT64.max


def _plain_attr(value: Any) -> str | int | float:
    """An attribute as text, int or float, which every HDF5 reader knows; all else as JSON text.

    The bytes of a path that are no text become escapes.
    """
    if type(value) is float or _is_int64(value):
        return value
    text = value if type(value) is str else json.dumps(value, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def to_rows(dataset: "xarray.Dataset") -> list[LoggedRow]:
    """The inverse of `to_dataset`, up to NaN for what a row lacked."""
    columns = {str(name): (len(var.dims), var.values.tolist()) for name, var in dataset.data_vars.items()}
    return [
        LoggedRow(
            draw,
            {name: column[place] for name, (dims, column) in columns.items() if dims == 1},
            {name: column[place] for name, (dims, column) in columns.items() if dims == 2},
        )
        for place, draw in enumerate(dataset["draw"].values.tolist())
    ]


def write_dataset(dataset: "xarray.Dataset", path: Path) -> None:
    """Write a dataset to `path` as netCDF-4/HDF5, atomically: the file that xarray would write.

    The file is made in memory: HDF5 then needs no lock of a parallel file system, and no disk that fills up meanwhile.

    Raises:
        RecordError: the file cannot be written.
    """
    buffer = io.BytesIO()
    plain = {name: {"_FillValue": None} for name in dataset.variables}  # NaN is a value
    dataset.to_netcdf(buffer, engine="h5netcdf", encoding=plain)
    write_atomically(path, buffer.getvalue())


def read_dataset(path: Path) -> "xarray.Dataset | None":
    """The dataset at `path`, in memory; None if there is no such file. RecordError if it cannot be read as one."""
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
        dataset["draw"], dataset["rank"]
        for name, variable in dataset.data_vars.items():
            if variable.dims not in (("draw",), ("draw", "rank")):
                raise ValueError(f"{name} has the dimensions {variable.dims}")
    except Exception as error:  # HDF5 and its two wrappers raise OSError, KeyError, RuntimeError, ValueError, …
        raise RecordError(
            f"{path} ({len(content):,} bytes) is not a run's dataset or is damaged: {error}. "
            "Restore it from a copy, or move it away to read what the journal holds."
        ) from error
    for column in dataset.variables.values():
        column.encoding.clear()
    return dataset


def marks_of(ds: "xarray.Dataset") -> list[dict[str, Any]]:
    """Where the run of a dataset was resumed."""
    try:
        marks = parse_json(ds.attrs.get(MARKS, "[]"), list)
        return [mark for mark in marks if isinstance(mark.get("draw"), int)]
    except (ValueError, TypeError, AttributeError):
        return []


class Joined(NamedTuple):
    """A run's rows as one dataset.

    Attributes:
        journal: what its journal holds of them; None where there is none, and the dataset is that of the file.
    """

    dataset: "xarray.Dataset"
    journal: JournalContents | None


def join(folder: Path, ending: Ending | None) -> Joined:
    """Join the rows of the journal with those of the file before it.

    Args:
        ending: how the run has ended; None: it goes on.

    Raises:
        RecordError: there is neither, or one is damaged.
    """
    journal = read_journal(folder / JOURNAL)  # before the dataset: a run that ends meanwhile has written that first
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
    left_out = [text for text in (header.attrs.get(LEFT_OUT), journal.left_out) if text]
    if left_out:
        attrs[LEFT_OUT] = "; ".join(map(str, left_out))
    return Joined(to_dataset(header.ranks, attrs, rows, read_config(folder)), journal)


def finalize_now(folder: Path, ending: Ending) -> Path:
    """`finalize` where the caller knows that the run is over, and how it ended.

    A journal that has grown since it was read stays beside the dataset, and `load` counts each row once. One that was
    not read to its end stays as `DAMAGED`.
    """
    dataset, journal = join(folder, ending)
    path = folder / JOURNAL
    if journal is not None:  # else another process has made the dataset meanwhile
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
    except RecordError as error:  # such as a full disk: the dataset has the ending as well
        log.warning("%s", error)
    return folder / DATASET


def still_writing(folder: Path, why: str) -> RecordError:
    return RecordError(
        f"the run in {folder} is still writing ({why}): it makes {DATASET} itself when it ends. "
        "Until then mmm.history.load and `mmm history` read it as it is."
    )


def no_record(folder: Path) -> RecordError:
    names = sorted(path.name for path in folder.iterdir())
    shown = names[:8] + ["…"] * (len(names) > 8) or ["nothing"]
    return RecordError(
        f"{folder} holds no run's record: neither {DATASET} nor {JOURNAL} is in it, but {', '.join(shown)}. "
        "Give the folder of one run, e.g. outputs/<module>/<timestamp>."
    )


def startup_marks(config: Mapping[str, Any], ranks: int) -> dict[str, list[float | None]]:
    """The marks of each rank's start-up, by name; empty before the first step has ended."""
    marks = {}
    try:
        for name, times in config["startup"]["marks"].items():
            if len(times) <= ranks and all(type(time) in (float, int, type(None)) for time in times):
                marks[name] = times
    except (KeyError, TypeError, AttributeError):
        return {}  # a user may edit config.json; the rows do not depend on it
    return marks
