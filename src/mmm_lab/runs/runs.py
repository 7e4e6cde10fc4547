"""What a run is, and has reached: of its record the columns that tell how far it is, over the ranks the median."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.errors import RecordError
from mmm.history.record.dataset import no_record
from mmm.history.record.ending import FINISHED, KILLED, RUNNING, Ending, read_config
from mmm.history.record.folder import CONFIG, DATASET, JOURNAL
from mmm.history.record.reader import RECENT, dataset_of, ending_by_journal, recorded_state

if TYPE_CHECKING:
    import xarray

Rows = dict[str, np.ndarray]  # name: (draw,) float64, NaN where a row lacks it
PROGRESS = ("iter", "epoch", "loss", "train_loss", "val_loss", "test_loss", "test_acc", "dt", "tps", "sps")
RANKS = "dt_ranks"  # a column of how many ranks gave a step's time
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
        rows: the columns of `PROGRESS` that its record has, and `RANKS`.
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
            return np.zeros(0)
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


def ending_in(folder: Path) -> Ending:
    """How the run in a folder has ended, or that it goes on. Raises RecordError: there is no run."""
    if not has_rows(folder) and "module" not in read_config(folder):
        raise no_record(folder)
    ending = ending_by_journal(folder) or recorded_state(folder)
    if ending is not None:
        return ending
    if has_rows(folder):
        return Ending(FINISHED)  # an older record says nothing
    # A run that has a config.json alone starts, or was killed before it could say more.
    age = time.time() - (folder / CONFIG).stat().st_mtime
    return Ending(RUNNING if age < RECENT else KILLED)


def has_rows(folder: Path) -> bool:
    """Whether a folder has the rows of a run."""
    return (folder / DATASET).exists() or (folder / JOURNAL).exists()


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises RecordError: there is no record, or it is damaged."""
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder. Give the folder of a run, e.g. outputs/<module>/<timestamp>.")
    ending = ending_in(folder)
    rows = rows_of(dataset_of(folder, ending)) if has_rows(folder) else {}
    return Run(folder, ending, read_config(folder), rows)


def rows_of(dataset: xarray.Dataset) -> Rows:
    """The columns of `PROGRESS` that a record has, of a rank's column the median; and `RANKS`."""
    rows: Rows = {}
    for variable in dataset.data_vars:
        name = str(variable).removesuffix("_median")
        if name in PROGRESS:
            values = dataset[variable].values.astype(np.float64)
            if name == "dt" and values.ndim == 2 and values.shape[1] > 1:
                rows[RANKS] = np.isfinite(values).sum(axis=1).astype(np.float64)
            rows[name] = _median(values)
    return rows


def _median(values: np.ndarray) -> np.ndarray:
    """(draw,) of (draw, rank): the median over the ranks that gave a number."""
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
