"""Rows to a labelled dataset, the dataset to and from its file, and a journal to a dataset.

xarray is imported where it is used: not to write the file, since pandas comes with it, and both together take as long
to import as a third of PyTorch.

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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.ending import RUNNING, Ending, config_with, parsed, read_config, write_ending
from mmm.history.record.folder import DAMAGED, DATASET, JOURNAL, reason, write_atomically
from mmm.history.record.journal import LEFT_OUT, Header, LoggedRow, read_journal
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
    base, over = name, ""
    if name not in _ABOUT and (match := _REDUCED.match(name)):
        base, over = match.groups()
        if over == "argmax":
            return {"long_name": f"rank with the largest {base}"}
    what, unit = _ABOUT.get(base, (base, ""))
    if not unit and (prefix := re.match(r"(dt|sps|tps)_", base)):
        unit = _ABOUT[prefix[1]][1]
    attrs = {"long_name": f"{what}, {_OVER[over]}" if over else what}
    return {**attrs, "units": unit} if unit else attrs


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


class Columns(NamedTuple):
    """What a dataset is made of, as xarray takes it.

    Attributes:
        variables, coordinates: name: (dimension or dimensions, values, attributes, which may be left out).
        attrs: text, int or float.
    """

    variables: dict[str, tuple[Any, ...]]
    coordinates: dict[str, tuple[Any, ...]]
    attrs: dict[str, Any]

    def dataset(self) -> "xarray.Dataset":
        import xarray

        return xarray.Dataset(*self)


def to_columns(
    header: Header,
    rows: Iterable[LoggedRow],
    extra_attrs: Mapping[str, Any],
    startup: Mapping[str, Sequence[float | None]],
) -> Columns:
    """One dataset of all `rows`. A missing value is NaN; a column of ints alone is int64, any other float64.

    A scalar in a column that other rows have by rank is rank 0's. `startup`: mark: seconds since 1970 by rank.
    """
    by_draw = {row.draw: row for row in rows}  # a draw that is in dataset and journal counts once
    draws = sorted(by_draw)
    logged = [by_draw[draw] for draw in draws]
    by_rank = dict.fromkeys(name for row in logged for name in row.per_rank)
    names = dict.fromkeys(name for row in logged for name in row.row) | by_rank
    variables: dict[str, Any] = {}
    for name in names:
        if name in by_rank:
            lists = [row.per_rank.get(name) or [row.row.get(name, math.nan)] for row in logged]
            # Fewer, where a run went on with fewer ranks.
            padded = [[*values, *[math.nan] * (len(header.ranks) - len(values))] for values in lists]
            variables[name] = (("draw", "rank"), _array(padded, chain(*padded)), about(name))
        else:
            column = [row.row.get(name, math.nan) for row in logged]
            variables[name] = ("draw", _array(column, column), about(name))

    coordinates: dict[str, Any] = {
        "draw": ("draw", np.array(draws, dtype=np.int64), {"long_name": "logged row"}),
        "rank": ("rank", np.arange(len(header.ranks)), {"long_name": "rank"}),
    }
    for name in dict.fromkeys(key for place in header.ranks for key in place):
        if _ints([place.get(name, -1) for place in header.ranks]):
            rank_values = np.array([place.get(name, -1) for place in header.ranks], dtype=np.int64)
        else:
            rank_values = np.array([str(place.get(name, "")) for place in header.ranks])
        coordinates[name] = ("rank", rank_values)
    for name, seconds in startup.items():
        about_it = {"long_name": f"start-up: {name.replace('_', ' ')}, seconds of 1970's epoch", "units": "s"}
        missing = [np.nan] * (len(header.ranks) - len(seconds))
        coordinates[f"startup_{name}"] = ("rank", np.array([*seconds, *missing], dtype=np.float64), about_it)
    return Columns(variables, coordinates, plain_attrs({**header.attrs, **extra_attrs}))


def _array(values: Sequence[Any], elements: Iterable[Any]) -> np.ndarray:
    """Of whole numbers int64, else float64."""
    return np.array(values, dtype=np.int64 if _ints(elements) else np.float64)


def _ints(values: Iterable[Any]) -> bool:
    return all(type(value) is int and INT64.min <= value <= INT64.max for value in values)


def to_rows(dataset: "xarray.Dataset") -> list[LoggedRow]:
    """The inverse of `to_columns`, up to NaN for what a row lacked."""
    columns = {str(name): (len(var.dims), var.values.tolist()) for name, var in dataset.data_vars.items()}
    return [
        LoggedRow(
            draw,
            {name: column[place] for name, (dims, column) in columns.items() if dims == 1},
            {name: column[place] for name, (dims, column) in columns.items() if dims == 2},
        )
        for place, draw in enumerate(dataset["draw"].values.tolist())
    ]


def plain_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as text, int or float, which every HDF5 reader knows; all else as JSON text.

    The bytes of a path that are no text become escapes.
    """

    def plain(value: Any) -> str | int | float:
        if type(value) is float or _ints([value]):
            return value
        text = value if type(value) is str else json.dumps(value, default=str)
        return text.encode("utf-8", "backslashreplace").decode()

    return {str(key): plain(value) for key, value in attrs.items()}


def write_dataset(columns: Columns, path: Path) -> None:
    """Write a dataset to `path` as netCDF-4/HDF5, atomically: the file that xarray would write.

    The file is made in memory: HDF5 then needs no lock of a parallel file system, and no disk that fills up meanwhile.

    Raises:
        RecordError: the file cannot be written.
    """
    buffer = io.BytesIO()
    dataset = columns.dataset()
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
        if odd := [name for name, var in dataset.data_vars.items() if var.dims not in (("draw",), ("draw", "rank"))]:
            raise ValueError(f"{odd[0]} has the dimensions {dataset[odd[0]].dims}")
    except Exception as error:  # HDF5 and its two wrappers raise OSError, KeyError, RuntimeError, ValueError, …
        raise RecordError(
            f"{path} ({len(content):,} bytes) is not a run's dataset or is damaged: {error}. "
            "Restore it from a copy, or move it away to read what the journal holds."
        ) from error
    for variable in dataset.variables.values():
        variable.encoding.clear()
    return dataset


def marks_of(ds: "xarray.Dataset") -> list[dict[str, Any]]:
    """Where the run of a dataset was resumed."""
    try:
        marks = parse_json(ds.attrs.get(MARKS, "[]"), list)
        return [mark for mark in marks if isinstance(mark.get("draw"), int)]
    except (ValueError, TypeError, AttributeError):
        return []


def join(folder: Path, ending: Ending | None) -> "tuple[Columns | xarray.Dataset, int, bool]":
    """What the journal and the file before it hold, with that ending (None: the one it has); how many bytes the journal
    has; and whether it is damaged. Without a journal the dataset."""
    journal = read_journal(folder / JOURNAL)  # before the dataset: a run that ends meanwhile has written that first
    stored = read_dataset(folder / DATASET)
    if journal is None:
        if stored is None:
            raise no_record(folder)
        return stored, 0, False
    header, rows, size, left_out_now = journal
    if stored is not None:
        rows = to_rows(stored) + rows
    config, ending = read_config(folder), ending or Ending(RUNNING)
    attrs = {"config": config_with(config, ending)} if config else {}
    if left_out := "; ".join(filter(None, (str(header.attrs.get(LEFT_OUT, "")), left_out_now))):
        attrs[LEFT_OUT] = left_out
    return (
        to_columns(header, rows, ending.attrs() | attrs, startup_marks(config, len(header.ranks))),
        size,
        bool(left_out_now),
    )


def finalize_now(folder: Path, ending: Ending) -> Path:
    """`finalize` where the caller knows that the run is over, and how it ended.

    A journal that has grown since it was read stays beside the dataset, and `load` counts each row once. One that was
    not read to its end stays as `DAMAGED`.
    """
    columns, size, is_damaged = join(folder, ending)
    if isinstance(columns, Columns):  # else another process has made the dataset meanwhile
        write_dataset(columns, folder / DATASET)
    try:
        if (folder / JOURNAL).stat().st_size != size:
            raise still_writing(folder, f"its journal has grown beyond the {size:,} bytes that were read")
        if is_damaged:
            (folder / JOURNAL).replace(folder / DAMAGED)
        else:
            (folder / JOURNAL).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecordError(f"cannot remove {folder / JOURNAL}: {reason(error)}. Its rows are in {DATASET}.") from error
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
    inside = sorted(p.name for p in folder.iterdir())
    shown = ", ".join(inside[:8]) + (", …" if len(inside) > 8 else "") if inside else "nothing"
    return RecordError(
        f"{folder} holds no run's record: neither {DATASET} nor {JOURNAL} is in it, but {shown}. "
        "Give the folder of one run, e.g. outputs/<module>/<timestamp>."
    )


def startup_marks(config: str, ranks: int) -> dict[str, list[float | None]]:
    """The marks of each rank's start-up, by name; empty before the first step has ended."""
    try:
        marks = parsed(config)["startup"]["marks"]
        types = (float, int, type(None))
        return {
            name: times for name, times in marks.items() if len(times) <= ranks and all(type(x) in types for x in times)
        }
    except (KeyError, TypeError, AttributeError):
        return {}  # a user may edit config.json; the rows do not depend on it
