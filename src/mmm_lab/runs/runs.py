"""Many runs at a time: what each is, and has reached. xarray is not needed for it.

Of a dataset only the columns that are asked for are read, and of a rank's column the median over the ranks. Of a step's
time it is also kept how many ranks gave one, as a column of its own, RANKS.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.dataset import no_record
from mmm.history.record.ending import FINISHED, KILLED, RUNNING, Ending, read_config
from mmm.history.record.folder import CONFIG, DATASET, JOURNAL, reason
from mmm.history.record.journal import LoggedRow, read_journal
from mmm.history.record.reader import RECENT, ending_by_journal, recorded_state
from mmm.outside import open_file

if TYPE_CHECKING:
    import h5py

Rows = dict[str, np.ndarray]  # name: (draw,) float64, NaN where a row lacks it; also "draw"
OVER_RANKS = ("draw", "rank", "local_rank", "pid")  # coordinates; so are axis_tp, startup_ready, …
PROGRESS = ("iter", "epoch", "loss", "train_loss", "val_loss", "test_loss", "test_acc", "dt", "tps", "sps")
RANKS = "dt_ranks"
MOST_ELEMENTS = 200_000_000  # of a column: a file may declare any number
NOT_SETTINGS = (
    "name",
    "outdir",
    "overwrite",
    "plots",
    "summary",
    "flush_every",
    "log_every",
    "log_all_ranks",
    "timeout",
)


@dataclass(frozen=True)
class Run:
    """A run as its folder says it.

    Attributes:
        config: of config.json; empty where it is missing or damaged.
        rows: the columns that were asked for.
    """

    folder: Path
    ending: Ending
    config: Mapping[str, Any]
    rows: Rows

    @property
    def layout(self) -> str:
        return str(self.config.get("layout") or "")

    @property
    def name(self) -> str | None:
        """That it was given (--name)."""
        name = self.config.get("name")
        return name if isinstance(name, str) and name else None

    @property
    def started(self) -> float | None:
        """In seconds since 1970."""
        return _seconds(self.config.get("started"))

    @property
    def ended(self) -> float | None:
        """In seconds since 1970; None while it runs, and of one that was killed."""
        return _seconds(self.config.get("ended"))

    @property
    def ranks(self) -> int:
        ranks = self.config.get("ranks")
        return len(ranks) if isinstance(ranks, list) and ranks else 1

    @property
    def flags(self) -> dict[str, Any]:
        """What the program was asked for, without where it writes and how much it says."""
        options = self.config.get("options")
        options = options if isinstance(options, dict) else {}
        return {name: value for name, value in options.items() if name not in NOT_SETTINGS}

    @property
    def row_of(self) -> str:
        """What a row is of: a step, or an epoch."""
        return row_of(self.rows)

    @functools.cached_property
    def steps_done(self) -> float | None:
        """Steps or epochs; None before the first row."""
        if "iter" in self.rows:
            done = last(self.rows["iter"])
            return None if done is None else done + 1
        return last(self.rows.get("epoch"))

    @property
    def steps(self) -> float | None:
        """Of `steps_done`: how many there will be."""
        options = self.config.get("options")
        epochs = options.get("epochs") if isinstance(options, dict) else None
        total = epochs if self.row_of == "epoch" else self.config.get("steps")
        return float(total) if isinstance(total, (int, float)) and math.isfinite(total) else None

    @property
    def loss(self) -> float | None:
        """The last training loss: NaN where the last step that was timed has none that is finite, None without any."""
        column = self.rows.get("loss", self.rows.get("train_loss"))
        if column is None:
            return None
        timed = np.flatnonzero(np.isfinite(self.rows.get("dt", [])))
        return math.nan if len(timed) and not np.isfinite(column[timed[-1] :]).any() else last(column)

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """(draw,): the time of the steps since the row before, of which ``dt`` is the mean."""
        dt = self.rows.get("dt")
        if dt is None:
            return np.zeros(len(self.rows.get("draw", ())))
        steps = np.ones(len(dt))
        if "iter" in self.rows:
            of_steps = np.flatnonzero(np.isfinite(self.rows["iter"]))  # others are no steps, such as a table's lines
            between = np.diff(self.rows["iter"][of_steps])
            steps[of_steps[1:]] = np.where(between > 0, between, 1)  # where another training begins, its first step
        return np.nan_to_num(dt * steps, nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def hours(self) -> float | None:
        """In steps: without start-up, validation and checkpoints. None without times."""
        return float(self.seconds.sum()) / 3600 if "dt" in self.rows else None

    @property
    def device_hours(self) -> float | None:
        """`hours`, each times the ranks that made it: a run that was resumed may have had more or fewer before. Of rows
        that do not say how many, those of config.json."""
        if "dt" not in self.rows:
            return None
        ranks = self.rows.get(RANKS, np.full(len(self.seconds), np.nan))
        return float((self.seconds * np.where(ranks > 0, ranks, self.ranks)).sum()) / 3600

    def mean_rate(self, rate: str) -> float | None:
        """Tokens (of ``tps``) or samples (of ``sps``) a second, over the steps of which it is known; None without."""
        if rate not in self.rows:
            return None
        known = np.isfinite(self.rows[rate]) & (self.seconds > 0)
        seconds = float(self.seconds[known].sum())
        return float((self.rows[rate][known] * self.seconds[known]).sum() / seconds) or None if seconds > 0 else None


def row_of(names: Container[str]) -> str:
    """What a row with these columns is of: a step, or an epoch."""
    return "epoch" if "iter" not in names and "epoch" in names else "step"


def last(column: np.ndarray | None) -> float | None:
    """The last number of a column."""
    if column is None:
        return None
    kept = column[np.isfinite(column)]
    return float(kept[-1]) if len(kept) else None


def _seconds(time: Any) -> float | None:
    """Since 1970, of a time as ISO 8601."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):  # anybody may edit config.json
        return None


def read_run(folder: Path, columns: Collection[str] = PROGRESS) -> Run:
    """The run in a folder.

    Args:
        columns: names of those that are read.

    Raises:
        RecordError: there is no record, or it is damaged.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder. Give the folder of a run, e.g. outputs/<module>/<timestamp>.")
    config = read_config(folder)
    ending = ending_by_journal(folder)
    rows = read_rows(folder, columns)
    if rows is None and "module" not in config:
        raise no_record(folder)
    if ending is None:
        ending = recorded_state(folder) or (Ending(FINISHED) if rows is not None else _without_rows(folder))
    return Run(folder, ending, config, rows or {})


def _without_rows(folder: Path) -> Ending:
    """A run that has a config.json alone starts, or was killed before it could say more."""
    return Ending(RUNNING if time.time() - (folder / CONFIG).stat().st_mtime < RECENT else KILLED)


def read_rows(folder: Path, columns: Collection[str] = PROGRESS) -> Rows | None:
    """The columns of a run, of its dataset and its journal; None where there is neither. RecordError: damaged."""
    journal = read_journal(folder / JOURNAL)  # first: a run that ends meanwhile has written its dataset before
    stored = _stored(folder / DATASET, columns)
    if journal is None:
        return stored
    before = len(stored["draw"]) if stored is not None else 0
    newest = stored["draw"][-1] if stored is not None and before else -1
    rows = [row for row in journal.rows if row.draw > newest]
    added = {"draw": np.array([float(row.draw) for row in rows])} | _columns(rows, columns)
    stored = stored or {}
    return {
        name: np.concatenate([stored.get(name, np.full(before, np.nan)), added.get(name, np.full(len(rows), np.nan))])
        for name in dict.fromkeys([*stored, *added])
    }


def _columns(rows: Sequence[LoggedRow], columns: Collection[str]) -> Rows:
    found: Rows = {}
    for place, row in enumerate(rows):
        for name, value in [*row.row.items(), *row.per_rank.items()]:
            plain = name.removesuffix("_median")
            if plain in columns:
                for column, of in _reduced(plain, np.array([value], dtype=np.float64).reshape(1, -1)).items():
                    found.setdefault(column, np.full(len(rows), np.nan))[place] = of[0]
    return found


def _stored(path: Path, columns: Collection[str]) -> Rows | None:
    """The columns of a dataset; None if there is no such file."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {reason(error)}.") from error
    import h5py

    try:
        with file, h5py.File(file, "r") as dataset:
            size = dataset["draw"].shape[0]
            if size > MOST_ELEMENTS:
                raise ValueError(f"it has {size} rows")
            names = {name.removesuffix("_median"): name for name in dataset if _is_column(dataset, name, size)}
            wanted = [name for name in names if name in columns]
            read: Rows = {"draw": _median(dataset["draw"][()])}
            for name in wanted:
                read |= _reduced(name, dataset[names[name]][()])
            return read
    except Exception as error:  # HDF5 and its wrapper raise OSError, KeyError, RuntimeError, ValueError, …
        raise RecordError(f"{path} is not a run's dataset or is damaged: {error}.") from error


def _is_column(dataset: h5py.File, name: str, size: int) -> bool:
    """Whether a variable has a number, or one a rank, for each row. It goes by names which of them lie over the ranks:
    HDF5 can read for minutes in damaged dimensions."""
    shape, kind = dataset[name].shape, dataset[name].dtype.kind
    if not 1 <= len(shape) <= 2 or shape[0] != size or kind not in "iuf":
        return False
    if np.prod([float(length) for length in shape]) > MOST_ELEMENTS:
        raise ValueError(f"{name} has {shape} elements")
    return name not in OVER_RANKS and not name.startswith(("axis_", "startup_"))


def _reduced(name: str, values: np.ndarray) -> Rows:
    """A column by name, and of a step's time by rank also `RANKS`."""
    reduced = {name: _median(values)}
    if name == "dt" and values.ndim == 2 and values.shape[1] > 1:
        reduced[RANKS] = np.isfinite(values).sum(axis=1).astype(np.float64)
    return reduced


def _median(values: np.ndarray) -> np.ndarray:
    """(draw,) as float64; of (draw, rank) the median over the ranks that gave a number."""
    values = values.astype(np.float64)
    if values.ndim == 1:
        return values
    known = np.isfinite(values).any(axis=1)
    result = np.full(len(values), np.nan)
    if known.any():
        result[known] = np.nanmedian(values[known], axis=1)
    return result


def differing(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that have more than one value, among the mappings that have them."""
    seen: dict[str, set[str]] = {}
    for mapping in values:
        for name, value in mapping.items():
            seen.setdefault(name, set()).add(repr(value))
    return [name for name, different in seen.items() if len(different) > 1]
