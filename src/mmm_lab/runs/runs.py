"""Reads what a run is, and what it has reached. Columns that differ by rank are reduced to their median."""

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

from mmm.history.record.dataset import no_record
from mmm.history.record.ending import FINISHED, KILLED, RUNNING, Ending, read_config, read_ending
from mmm.history.record.folder import CONFIG, DATASET, JOURNAL
from mmm.history.record.reader import RECENT, load, recorded_state

if TYPE_CHECKING:
    import xarray

Rows = dict[str, np.ndarray]  # name → (draw,) float64, NaN where a row has no value
PROGRESS = ("iter", "epoch", "loss", "train_loss", "val_loss", "test_loss", "test_acc", "dt", "tps", "sps")
# Column with the number of ranks that gave a step's time.
RANKS = "dt_ranks"
# Flags that do not change what a run computes.
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
    """A run, as its folder describes it.

    Attributes:
        config: contents of config.json; empty if it is missing or damaged.
        rows: the columns of `PROGRESS` that the record has, and `RANKS`.
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
        """The name that it was given (--name)."""
        name = self.config.get("name")
        return name if isinstance(name, str) and name else None

    @property
    def started(self) -> float | None:
        """When it started, in seconds since 1970."""
        return _seconds(self.config.get("started"))

    @property
    def ranks(self) -> int:
        ranks = self.config.get("ranks")
        return len(ranks) if isinstance(ranks, list) and ranks else 1

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the program, without those that say where it writes and how much it prints."""
        options = self._options
        return {name: value for name, value in options.items() if name not in NOT_SETTINGS}

    @property
    def _options(self) -> dict[str, Any]:
        options = self.config.get("options")
        return options if isinstance(options, dict) else {}

    @property
    def row_of(self) -> str:
        """What a row stands for: ``step`` or ``epoch``."""
        return row_of(self.rows)

    @functools.cached_property
    def steps_done(self) -> float | None:
        """Number of steps or epochs that are done. None before the first row."""
        if "iter" in self.rows:
            done = last(self.rows["iter"])
            return None if done is None else done + 1
        return last(self.rows.get("epoch"))

    @property
    def steps(self) -> float | None:
        """How many steps or epochs there will be."""
        total = self._options.get("epochs") if self.row_of == "epoch" else self.config.get("steps")
        if isinstance(total, (int, float)) and math.isfinite(total):
            return float(total)
        return None

    @property
    def loss(self) -> float | None:
        """The last training loss. NaN if the last step that was timed had no finite loss; None without any loss."""
        column = self.rows.get("loss", self.rows.get("train_loss"))
        if column is None:
            return None
        timed = np.flatnonzero(np.isfinite(self.rows.get("dt", [])))
        # Rows without a time, such as those of a validation, have no training loss.
        if len(timed) and not np.isfinite(column[timed[-1] :]).any():
            return math.nan
        return last(column)

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """(draw,): seconds of all steps since the row before. ``dt`` is their mean."""
        dt = self.rows.get("dt")
        if dt is None:
            return np.zeros(0)
        steps = np.ones(len(dt))
        if "iter" in self.rows:
            # Other rows are not of steps, such as the lines of a table.
            step_rows = np.flatnonzero(np.isfinite(self.rows["iter"]))
            between = np.diff(self.rows["iter"][step_rows])
            # The number falls where the program trains another model: that row is its first step.
            steps[step_rows[1:]] = np.where(between > 0, between, 1)
        return np.nan_to_num(dt * steps, nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def hours(self) -> float | None:
        """Hours spent in steps, without start-up, validation and checkpoints. None if no step was timed."""
        if "dt" not in self.rows:
            return None
        return float(self.seconds.sum()) / 3600

    @property
    def device_hours(self) -> float | None:
        """`hours` times ranks. Each row counts its own ranks, since a run may be resumed on more or fewer.

        A row that does not say how many counts those of config.json.
        """
        if "dt" not in self.rows:
            return None
        # (draw,)
        ranks = self.rows.get(RANKS, np.full(len(self.seconds), np.nan))
        return float((self.seconds * np.where(ranks > 0, ranks, self.ranks)).sum()) / 3600

    def mean_rate(self, rate: str) -> float | None:
        """Tokens (``tps``) or samples (``sps``) per second, over all steps with a rate. None if there are none."""
        if rate not in self.rows:
            return None
        known = np.isfinite(self.rows[rate]) & (self.seconds > 0)
        seconds = float(self.seconds[known].sum())
        if seconds <= 0:
            return None
        return float((self.rows[rate][known] * self.seconds[known]).sum() / seconds) or None


def row_of(names: Container[str]) -> str:
    """What a row with these columns stands for: ``step`` or ``epoch``."""
    return "epoch" if "iter" not in names and "epoch" in names else "step"


def last(column: np.ndarray | None) -> float | None:
    """The last finite number of a column. None if it has none."""
    if column is None:
        return None
    finite = column[np.isfinite(column)]
    return float(finite[-1]) if len(finite) else None


def _seconds(time: Any) -> float | None:
    """Seconds since 1970 for a time in ISO 8601. None if it is not one."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        # A person may have edited config.json.
        return None


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises RecordError if there is no record, or it is damaged."""
    if (folder / DATASET).exists() or (folder / JOURNAL).exists():
        return run_of(folder, load(folder))
    config = read_config(folder)
    if "module" not in config:
        raise no_record(folder)
    # With only a config.json the run is starting, or was killed before it wrote more.
    # There is no journal yet, so the age of config.json decides.
    age = time.time() - (folder / CONFIG).stat().st_mtime
    starting = Ending(RUNNING if age < RECENT else KILLED)
    return Run(folder, recorded_state(folder) or starting, config, {})


def run_of(folder: Path, dataset: xarray.Dataset) -> Run:
    """The run in a folder, whose record has been read."""
    # A record of a version that noted no ending is of a run that finished.
    ending = read_ending(dataset.attrs) or Ending(FINISHED)
    return Run(folder, ending, read_config(folder), rows_of(dataset))


def rows_of(dataset: xarray.Dataset) -> Rows:
    """The columns of `PROGRESS` that a record has, and `RANKS`. Columns that differ by rank become their median."""
    rows: Rows = {}
    for variable in dataset.data_vars:
        name = str(variable).removesuffix("_median")
        if name in PROGRESS:
            column = dataset[variable].astype(np.float64)
            # A rank without a number had not joined, or was gone. xarray's median leaves it out.
            if "rank" in column.dims:
                if name == "dt":
                    rows[RANKS] = column.count("rank").values.astype(np.float64)
                column = column.median("rank")
            rows[name] = column.values
    return rows


def differing(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that do not have the same value in all mappings that have them."""
    # Values may be lists, which cannot be in a set; their texts can.
    seen: dict[str, set[str]] = {}
    for mapping in values:
        for name, value in mapping.items():
            seen.setdefault(name, set()).add(repr(value))
    return [name for name, different in seen.items() if len(different) > 1]
