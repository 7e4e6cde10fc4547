"""Compares the losses of two runs, step by step, by their records. It says whether the curve is the same, not why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmm.errors import RecordError
from mmm.history import load
from mmm.history.record.dataset import is_known
from mmm.history.record.ending import read_config
from mmm.units import counted
from mmm_lab.runs.diverge import SMALL, TOLERANCE, TOLERANCES, Array

if TYPE_CHECKING:
    import xarray

# Columns that say how well a model fits, in the order in which they are looked at. Times and rates differ always.
CURVES = ("loss", "train_loss", "grad_norm", "val_loss", "val_bpb", "test_loss", "test_acc")
# These have a value only in some rows.
SOMETIMES = ("val_", "test_")
# Before the names of a program's own times and rates.
RATES = ("dt", "sps", "tps")
STEPS = ("iter", "epoch")


@dataclass(frozen=True)
class LossComparison:
    """What was compared, and where the runs part.

    Attributes:
        about: layout, data type and number of ranks of each run.
        tolerance: the largest relative difference at which two values count as the same.
        columns: the columns that were compared.
        largest: the largest relative difference in each step, by step; infinite if only one value is a number.
        step: the first step with a larger difference than the tolerance; None if there is none.
        column: the first column that differs in that step.
        values: its values in both runs.
        difference: their relative difference.
    """

    about: tuple[str, str]
    tolerance: float
    columns: tuple[str, ...]
    largest: Mapping[int, float]
    step: int | None
    column: str
    values: tuple[float, float]
    difference: float


def compare_losses(run_a: Path, run_b: Path, tolerance: float | None = None) -> LossComparison:
    """Compare the records of two runs.

    Args:
        tolerance: as for `diverge`; by default that of rounding, by the runs' data types.

    Raises:
        RecordError: a run has no record, or the two have no step or no column in common.
    """
    runs = load(run_a), load(run_b)
    configs = read_config(run_a), read_config(run_b)
    columns = _columns(*runs)
    if not columns:
        raise RecordError(f"{run_a} and {run_b} have no column in common that can be compared, such as loss")
    steps_a, steps_b = (_steps(run) for run in runs)
    steps, rows_a, rows_b = np.intersect1d(steps_a, steps_b, return_indices=True)
    if not steps.size:
        raise RecordError(f"{run_a} and {run_b} have no step in common")
    # The run with fewer bits decides what is rounding.
    dtypes = [_dtype(config) for config in configs]
    if tolerance is None:
        tolerance = max(TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes)

    a, b = runs
    # (columns, steps)
    values_a = np.stack([a[name].values[rows_a].astype(float) for name in columns])
    values_b = np.stack([b[name].values[rows_b].astype(float) for name in columns])
    differences = np.stack([_differences(name, *pair) for name, *pair in zip(columns, values_a, values_b, strict=True)])
    largest = differences.max(axis=0)
    step = None
    column = 0
    row = 0
    differing = np.flatnonzero(~(largest <= tolerance))
    if differing.size:
        row = int(differing[0])
        step = int(steps[row])
        column = int(np.argmax(~(differences[:, row] <= tolerance)))
    about = []
    for run, config, dtype in zip(runs, configs, dtypes, strict=True):
        ranks = counted(int(run.attrs["world_size"]), "rank")
        about.append(f"layout {config.get('layout', '?')}, {dtype or 'dtype ?'}, {ranks}")
    return LossComparison(
        about=(about[0], about[1]),
        tolerance=tolerance,
        columns=tuple(columns),
        largest=dict(zip(steps.tolist(), largest.tolist(), strict=True)),
        step=step,
        column=columns[column],
        values=(float(values_a[column, row]), float(values_b[column, row])),
        difference=float(differences[column, row]),
    )


def _columns(a: xarray.Dataset, b: xarray.Dataset) -> list[str]:
    """The columns of both runs that are compared: those that every program calls so; else a program's own."""
    common = [str(name) for name in a.data_vars if name in b and a[name].dims == b[name].dims == ("draw",)]
    known = [name for name in CURVES if name in common]
    return known or [name for name in common if not is_known(name) and not name.startswith(RATES)]


def _steps(run: xarray.Dataset) -> Array:
    """The step of each row."""
    for name in STEPS:
        if name in run:
            return np.asarray(run[name].values)
    return np.asarray(run["draw"].values)


def _dtype(config: Mapping[str, object]) -> str:
    precision = config.get("precision")
    return str(precision.get("name", "")) if isinstance(precision, dict) else ""


def _differences(name: str, a: Array, b: Array) -> Array:
    """Relative differences of a column, (steps,). A value that is a number in one run only differs infinitely."""
    with np.errstate(invalid="ignore"):
        sizes = np.fmax(np.abs(a), np.abs(b))
        # Where a column is nearly 0 its rounding is not.
        finite = sizes[np.isfinite(sizes)]
        usual = np.sqrt(np.mean(finite**2)) if finite.size else 1.0
        scale = np.fmax(sizes, SMALL * usual)
        scale[~(scale > 0)] = 1.0
        differences = np.abs(a - b) / scale
    neither = ~(np.isfinite(a) | np.isfinite(b))
    either = ~(np.isfinite(a) & np.isfinite(b))
    differences[either] = np.inf
    differences[neither] = 0.0
    # Two runs need not have been evaluated at the same steps.
    if name.startswith(SOMETIMES):
        differences[either] = 0.0
    return differences
