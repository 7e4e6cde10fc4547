"""Where two runs part: the first step, and in it the first of batch, loss, gradients on the way back, and weights.

The runs may have different layouts: they are compared by fingerprints (`mmm.parallel.fingerprint`). Those of two
tensors that differ by Δ differ by about the norm of Δ, so a difference is given relative to the tensor's norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmm.errors import RecordError
from mmm.history.record.fingerprints import GRADIENT, OUTPUT, WEIGHT, Fingerprints, Header, read_fingerprints

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3}  # Adam's first steps make 1e-4 of float32's rounding
TOLERANCE = 5e-2  # of 16 bits
SMALL = 1e-3  # a gradient that is smaller than this part of all is compared to this part: it may be rounding alone
JUMP = 10.0  # times the largest difference before

OUTPUT_NOISE = {"fp64": 1e-12, "fp32": 2e-5}  # of a block's sum of squares, where the runs have not shown more

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Divergence:
    """What was compared, and where the runs part.

    Attributes:
        headers: of the two runs. tolerance: the relative difference from which on they part.
        largest: of each step, the largest relative difference, up to the one where they part.
        step, entry, difference: where they part, and by how much; None where they do not. Step -1: from the beginning.
        same, likewise: the entries of that step that were compared before it, and those that part too.
        block: where the loss has parted: the first block whose output is another; empty where none is.
        ranks: a sentence on which ranks; empty where nothing can be said.
    """

    headers: tuple[Header, Header]
    tolerance: float
    largest: Mapping[int, float]
    step: int | None = None
    entry: str | None = None
    difference: float = 0.0
    same: Sequence[str] = field(default=())
    likewise: Sequence[str] = field(default=())
    block: str = ""
    ranks: str = ""

    @property
    def at_once(self) -> bool:
        """Whether the difference came in one step, and did not grow over many, as that of rounding does."""
        before = [largest for step, largest in self.largest.items() if step != self.step]
        return not before or self.difference > JUMP * max(before)


def diverge(run_a: Path, run_b: Path, tolerance: float | None = None) -> Divergence:
    """Compare the fingerprints of two runs.

    Args:
        tolerance: relative; None: 1e-9 where both are in float64, 1e-3 in float32, else 0.05.

    Raises:
        RecordError: a run has none, or they have no step or no parameter in common.
    """
    runs = read_fingerprints(run_a), read_fingerprints(run_b)
    steps = [step for step in runs[0] if step in runs[1]]
    if not steps:
        raise RecordError(f"{run_a} and {run_b} have fingerprints of no step in common")
    headers = runs[0][steps[0]].header, runs[1][steps[0]].header
    common = [entry for entry in headers[0].entries if entry in headers[1].entries]
    entries = [entry for entry in common if not entry.startswith(OUTPUT)]
    outputs = [entry for entry in common if entry.startswith(OUTPUT)]
    if not any(entry.startswith(WEIGHT) for entry in entries):
        raise RecordError(f"{run_a} and {run_b} have no parameter in common: they are of different models")
    if tolerance is None:
        tolerance = max(TOLERANCES.get(header.dtype, TOLERANCE) for header in headers)
    largest: dict[int, float] = {}
    noise = max(OUTPUT_NOISE.get(header.dtype, 1e-2) for header in headers)
    for step in steps:
        a, b = (run[step] for run in runs)
        headers = a.header, b.header
        differences = _differences(a, b, entries)
        largest[step] = float(np.max(np.nan_to_num(differences, nan=np.inf)))
        of_outputs = _output_differences(a, b, outputs)
        parted = [index for index, difference in enumerate(differences) if not difference <= tolerance]
        if parted:
            first = parted[0]
            return Divergence(
                headers=headers,
                tolerance=tolerance,
                largest=largest,
                step=step,
                entry=entries[first],
                difference=float(differences[first]),
                same=entries[:first],
                likewise=[entries[index] for index in parted[1:]],
                block=next((o for o, d in zip(outputs, of_outputs, strict=True) if not d <= noise), ""),
                ranks=_which_ranks(a, b, entries[first], tolerance),
            )
        noise = max(noise, JUMP * max(of_outputs, default=0.0))
    return Divergence(headers=headers, tolerance=tolerance, largest=largest)


def _differences(a: Fingerprints, b: Fingerprints, entries: Sequence[str]) -> Array:
    """(entries,): relative; 0 where a run has not taken one, NaN where it is not a finite number in one run alone."""
    full_a, full_b = (_of_entries(run.header, run.full(), entries) for run in (a, b))
    result = np.sqrt(np.mean((full_a[:, :-1] - full_b[:, :-1]) ** 2, axis=1)) / _scales(full_a, full_b, entries)
    finite = np.isfinite(full_a).all(axis=1), np.isfinite(full_b).all(axis=1)
    result[~finite[0] & ~finite[1]] = 0.0
    result[finite[0] != finite[1]] = np.nan
    result[(full_a[:, -1] < 0) | (full_b[:, -1] < 0)] = 0.0
    return result


def _output_differences(a: Fingerprints, b: Fingerprints, outputs: Sequence[str]) -> list[float]:
    """Of each block's output the relative difference of the sums of squares, each over the ranks that hold the same."""
    squares = [_of_entries(run.header, run.local.sum(axis=0), outputs)[:, -1] for run in (a, b)]
    replicas = [_divisors(2 * run.header.ranks) for run in (a, b)]  # twice: checkpointing calls a block again
    factors = np.unique(replicas[0][:, None] / replicas[1])
    result = []
    for square_a, square_b in zip(*squares, strict=True):
        if not square_a > 0 or not square_b > 0:
            result.append(0.0 if square_a == square_b or min(square_a, square_b) < 0 else math.inf)
        else:
            result.append(float(np.min(np.abs(square_a / square_b / factors - 1))))
    return result


def _divisors(number: int) -> Array:
    return np.array([float(n) for n in range(1, number + 1) if number % n == 0])


def _of_entries(header: Header, table: Array, entries: Sequence[str]) -> Array:
    index = {entry: place for place, entry in enumerate(header.entries)}
    return table[[index[entry] for entry in entries]]


def _scales(full_a: Array, full_b: Array, entries: Sequence[str]) -> Array:
    """(entries,): the norm that each difference is relative to."""
    norms = np.sqrt(np.maximum(np.maximum(full_a[:, -1], full_b[:, -1]), 0.0))
    for kind in (GRADIENT, WEIGHT):
        of_kind = np.array([entry.startswith(kind) for entry in entries])
        if of_kind.any():
            floor = SMALL * np.sqrt(np.nanmean(np.where(np.isfinite(norms), norms, np.nan)[of_kind] ** 2))
            norms[of_kind] = np.fmax(norms[of_kind], floor)
    return np.where(norms > 0, norms, 1.0)


def _which_ranks(a: Fingerprints, b: Fingerprints, entry: str, tolerance: float) -> str:
    """Which ranks have other values: than the same ranks of the other run, or than those that hold the same shard."""
    full_a, full_b = (_of_entries(run.header, run.full(), [entry]) for run in (a, b))
    scale = float(_scales(full_a, full_b, [entry])[0])
    for name, run in (("the first run", a), ("the second run", b)):
        if sentence := _odd_replicas(run, entry, tolerance * scale, name):
            return sentence
    if a.header.shards is None or a.header.shards != b.header.shards:
        return ""
    index = a.header.entries.index(entry)
    apart = np.abs(a.local[:, index, :-1] - b.local[:, index, :-1]).max(axis=1)
    held = [rank for rank, shards in enumerate(a.header.shards) if shards[index] >= 0]
    differing = [rank for rank in held if not apart[rank] <= tolerance * scale]
    if not differing or len(differing) == len(held):
        return "every rank that holds a part of it" if differing else ""
    return f"rank {_listed(differing)} of the ranks {_listed(held)} that hold a part of it"


def _odd_replicas(run: Fingerprints, entry: str, most: float, name: str) -> str:
    """Of ranks that hold the same shard, those that have other values than most of them."""
    if run.header.shards is None:
        return ""
    index = run.header.entries.index(entry)
    by_shard: dict[int, list[int]] = {}
    for rank, shards in enumerate(run.header.shards):
        by_shard.setdefault(shards[index], []).append(rank)
    for shard, ranks in by_shard.items():
        values = run.local[ranks, index, :-1]
        apart = np.abs(values - np.median(values, axis=0)).max(axis=1)
        odd = [rank for rank, distance in zip(ranks, apart, strict=True) if not distance <= most]
        if shard >= 0 and odd:
            if 2 * len(odd) < len(ranks):
                return f"rank {_listed(odd)} of {name}: other values than {len(ranks) - len(odd)} ranks with its shard"
            return f"ranks {_listed(ranks)} of {name} hold the same shard, and have different values"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
