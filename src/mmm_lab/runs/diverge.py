"""Finds where two runs part: the first step, and in it the first of batch, loss, gradients in backward order, weights.

The runs may have different layouts, because their fingerprints do not depend on these
(`mmm.run.hooks.fingerprints`). With a tolerance of 0 the checksums of their bits are compared. Of runs without
fingerprints the columns of their records are compared, such as the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmm.errors import RecordError
from mmm.history import load
from mmm.history.record.dataset import is_known
from mmm.history.record.ending import read_config
from mmm.history.record.fingerprints import (
    GRADIENT,
    LOSS,
    WEIGHT,
    Fingerprints,
    has_fingerprints,
    read_fingerprints,
)
from mmm.units import counted

if TYPE_CHECKING:
    import xarray

# Adam's first steps turn the rounding of float32 into 1e-4.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3}
# For 16 bits.
TOLERANCE = 5e-2
# A value below this fraction of the usual one is compared with that fraction: it may be only rounding.
SMALL = 1e-3
# A difference that is so many times larger than any before came at once.
JUMP = 10.0
# The smallest relative difference of two numbers with other bits, in float64.
BIT = 2.0**-53
# Ranks that a sentence names.
RANKS_NAMED = 8
# Columns that say how well a model fits, in the order in which they are looked at. Times and rates differ always.
CURVES = ("loss", "train_loss", "grad_norm", "val_loss", "val_bpb", "test_loss", "test_acc")
# These have a value only in some rows.
SOMETIMES = ("val_", "test_")
# Before the names of a program's own times and rates.
RATES = ("dt", "sps", "tps")
STEPS = ("iter", "epoch")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Divergence:
    """What was compared, and where the runs part.

    Attributes:
        about: layout, data type and number of ranks of each run.
        tolerance: the largest relative difference at which two values count as the same; 0 if their bits were
            compared.
        largest: the largest relative difference of each step, up to the step where the runs part.
        step: step where they part; None if they do not, -1 if they differ from the beginning.
        entry: name of the first value that differs in that step; empty if the runs do not part.
        difference: relative difference of that value.
        same: values of that step that come before it, and are the same.
        likewise: values of that step that come after it, and differ too.
        values: this value in both runs, of runs without fingerprints.
        ranks: a sentence on the ranks that have other values; empty if nothing can be said.
        columns: the columns that were compared; empty if fingerprints were.
    """

    about: Sequence[str]
    tolerance: float
    largest: Mapping[int, float] = field(default_factory=dict)
    step: int | None = None
    entry: str = ""
    difference: float = 0.0
    same: Sequence[str] = ()
    likewise: Sequence[str] = ()
    values: Sequence[float] = ()
    ranks: str = ""
    columns: Sequence[str] = ()

    @property
    def at_once(self) -> bool:
        """Whether the difference came in one step. That of rounding grows over many steps."""
        before = [largest for step, largest in self.largest.items() if step != self.step]
        if not before:
            return True
        return self.difference > JUMP * max(before)


def diverge(run_a: Path, run_b: Path, tolerance: float | None = None) -> Divergence:
    """Compare two runs: their fingerprints, or their records if one has none.

    Args:
        tolerance: the largest relative difference that counts as none; 0: the bits have to be equal. By default 0 for
            the fingerprints of two exact runs of one partition; else 1e-9 if both runs are in float64, 1e-3 in
            float32, and 0.05 otherwise.

    Raises:
        RecordError: a run has no record, or the two have no step or nothing to compare in common.
    """
    if has_fingerprints(run_a) and has_fingerprints(run_b):
        return _compare_fingerprints(run_a, run_b, tolerance)
    return _compare_records(run_a, run_b, tolerance)


def _first_difference(result: Divergence, steps: Iterable[tuple[int, Sequence[str], Array]]) -> Divergence:
    """Find the first step with a difference above the tolerance.

    Args:
        result: what is compared.
        steps: of each step its index, the names of its values as it computes them, and their relative differences.
    """
    largest: dict[int, float] = {}
    result = replace(result, largest=largest)
    for step, names, differences in steps:
        largest[step] = float(differences.max())
        # NaN is not below the tolerance.
        differing = np.flatnonzero(~(differences <= result.tolerance)).tolist()
        if differing:
            # A step computes its values in this order: the first one that differs has caused the others.
            first, *later = differing
            return replace(
                result,
                step=step,
                entry=names[first],
                difference=float(differences[first]),
                same=names[:first],
                likewise=[names[index] for index in later],
            )
    return result


def _compare_fingerprints(run_a: Path, run_b: Path, tolerance: float | None) -> Divergence:
    a_steps = read_fingerprints(run_a)
    b_steps = read_fingerprints(run_b)
    steps = [step for step in a_steps if step in b_steps]
    if not steps:
        raise RecordError(f"{run_a} and {run_b} have no step with fingerprints in common")
    headers = [taken[steps[-1]].header for taken in (a_steps, b_steps)]
    a_header, b_header = headers
    common = [entry for entry in a_header.replicas if entry in b_header.replicas]
    if not any(entry.startswith(WEIGHT) for entry in common):
        raise RecordError(f"{run_a} and {run_b} have no parameter in common: they are of different models")
    rounding = _rounding(header.dtype for header in headers)
    if tolerance is None:
        tolerance = rounding
        # Exact runs of one partition in one data type promise equal bits.
        if a_header.exact is not None and (a_header.exact, a_header.dtype) == (b_header.exact, b_header.dtype):
            tolerance = 0.0
    compared = []
    for step in steps:
        a = a_steps[step]
        b = b_steps[step]
        taken_by_b = b.entries()
        entries = [entry for entry in a.entries() if entry in taken_by_b]
        differences = _tensor_differences(a, b, entries)
        if tolerance == 0:
            _look_at_bits(differences, a, b, entries, rounding)
        compared.append((step, entries, differences))
    about = [_about(header.layout, header.dtype, header.ranks) for header in headers]
    result = _first_difference(Divergence(about, tolerance), compared)
    if result.step is None:
        return result
    ranks = _which_ranks(a_steps[result.step], b_steps[result.step], result.entry, tolerance)
    return replace(result, ranks=ranks)


def _about(layout: str, dtype: str, ranks: int) -> str:
    n_ranks = counted(ranks, "rank")
    return f"layout {layout}, {dtype}, {n_ranks}"


def _rounding(dtypes: Iterable[str]) -> float:
    """The relative difference up to which two values differ by rounding. The run with fewer bits decides."""
    return max(TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes)


def _tensor_differences(a: Fingerprints, b: Fingerprints, entries: Sequence[str]) -> Array:
    """Relative differences of some entries, (entries,)."""
    # (entries, 2): the sum of each tensor, and its norm.
    a_sums = np.stack([a.full(entry) for entry in entries])
    b_sums = np.stack([b.full(entry) for entry in entries])
    scales = np.fmax(a_sums[:, 1], b_sums[:, 1])
    for kind in (GRADIENT, WEIGHT):
        of_kind = np.array([entry.startswith(kind) for entry in entries])
        if of_kind.any():
            scales[of_kind] = _scales(scales[of_kind])
    # If two tensors differ by Δ, their sums differ by about the norm of Δ, and their norms by at most that.
    differences = _relative(a_sums, b_sums, scales[:, None])
    # The larger of the two, (entries,)
    return differences.max(axis=1)


def _scales(sizes: Array) -> Array:
    """What differences of values of these sizes are relative to: the size, or a fraction of the usual one."""
    is_finite = np.isfinite(sizes)
    finite = sizes[is_finite]
    if finite.size == 0:
        return sizes
    mean_square = np.mean(finite**2)
    least = SMALL * np.sqrt(mean_square)
    return np.fmax(sizes, least)


def _relative(a: Array, b: Array, scales: Array) -> Array:
    """Relative differences, in the shape of `a`. A value that is finite in only one run differs infinitely."""
    positive = np.where(scales > 0, scales, 1.0)
    # inf - inf is NaN, and so is inf / inf.
    with np.errstate(invalid="ignore"):
        differences: Array = np.abs(a - b) / positive
    a_finite = np.isfinite(a)
    b_finite = np.isfinite(b)
    differences[a_finite != b_finite] = np.inf
    either_finite = a_finite | b_finite
    differences[~either_finite] = 0.0
    return differences


def _look_at_bits(
    differences: Array,
    a: Fingerprints,
    b: Fingerprints,
    entries: Sequence[str],
    rounding: float,
) -> None:
    """Make the differences 0 where the bits of two tensors are equal, and not 0 where they are not. In place."""
    for index, entry in enumerate(entries):
        a_replicas = round(a.header.replicas[entry])
        b_replicas = round(b.header.replicas[entry])
        # Each sum counts its own replicas. Checksums are integers modulo 2⁶⁴.
        a_sum = sum(a.checksums(entry)) * b_replicas
        b_sum = sum(b.checksums(entry)) * a_replicas
        equal = (a_sum - b_sum) % 2**64 == 0
        difference = differences[index]
        if entry == LOSS:
            # The summands of the loss depend on the number of ranks.
            equal = bool(difference <= rounding)
        if equal:
            differences[index] = 0.0
        else:
            differences[index] = max(difference, BIT)


def _which_ranks(a: Fingerprints, b: Fingerprints, entry: str, tolerance: float) -> str:
    """A sentence on the ranks whose own shards have other values, of two runs with the same layout."""
    if a.header.layout != b.header.layout:
        return ""
    _, scale = np.fmax(a.full(entry), b.full(entry))
    # Of sums and norms, (ranks, 2).
    differences = _relative(a.local(entry), b.local(entry), scale)
    differs = ~(differences.max(axis=1) <= tolerance)
    if tolerance == 0:
        differs = np.array(a.checksums(entry)) != np.array(b.checksums(entry))
    ranks = np.flatnonzero(differs).tolist()
    holders = [rank for rank, values in enumerate(a.ranks) if entry in values]
    if not ranks:
        return ""
    if ranks == holders:
        return "every rank that holds a part of it"
    return f"rank {_listed(ranks)} of the ranks {_listed(holders)} that hold a part of it"


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:RANKS_NAMED]))
    n_more = len(ranks) - RANKS_NAMED
    return f"{text} and {n_more} more" if n_more > 0 else text


def _compare_records(run_a: Path, run_b: Path, tolerance: float | None) -> Divergence:
    a = load(run_a)
    b = load(run_b)
    columns = _columns(a, b)
    if not columns:
        raise RecordError(f"{run_a} and {run_b} have no column in common that can be compared, such as loss")
    steps, a_rows, b_rows = np.intersect1d(_steps(a), _steps(b), return_indices=True)
    if not steps.size:
        raise RecordError(f"{run_a} and {run_b} have no step in common")
    about = []
    dtypes = []
    for folder, run in ((run_a, a), (run_b, b)):
        config = read_config(folder)
        precision = config.get("precision")
        dtype = "dtype ?"
        if isinstance(precision, dict):
            dtype = str(precision.get("name", dtype))
        dtypes.append(dtype)
        about.append(_about(config.get("layout", "?"), dtype, int(run.attrs["world_size"])))
    if tolerance is None:
        tolerance = _rounding(dtypes)
    # (columns, steps)
    a_values = a[columns].isel(draw=a_rows).to_array().values.astype(float)
    b_values = b[columns].isel(draw=b_rows).to_array().values.astype(float)
    sizes = np.fmax(np.abs(a_values), np.abs(b_values))
    differences = _relative(a_values, b_values, np.stack([_scales(column) for column in sizes]))
    # Two runs need not have been evaluated at the same steps.
    sometimes = np.array([name.startswith(SOMETIMES) for name in columns])
    in_one = np.isfinite(a_values) != np.isfinite(b_values)
    differences[in_one & sometimes[:, None]] = 0.0
    # A step is a column of these.
    compared = ((int(step), columns, row) for step, row in zip(steps, differences.T, strict=True))
    result = _first_difference(Divergence(about, tolerance, columns=columns), compared)
    if result.step is None:
        return result
    place = columns.index(result.entry), steps.tolist().index(result.step)
    return replace(result, values=(float(a_values[place]), float(b_values[place])))


def _columns(a: xarray.Dataset, b: xarray.Dataset) -> list[str]:
    """The columns of both runs that are compared: those that every program calls so; else a program's own."""
    common = []
    for name in map(str, a.data_vars):
        if name in b and a[name].dims == b[name].dims == ("draw",):
            common.append(name)
    known = [name for name in CURVES if name in common]
    if known:
        return known
    own = []
    for name in common:
        if not is_known(name) and not name.startswith(RATES):
            own.append(name)
    return own


def _steps(run: xarray.Dataset) -> Array:
    """The step of each row."""
    for name in STEPS:
        if name in run:
            return np.asarray(run[name].values)
    return np.asarray(run["draw"].values)
