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
Pair = tuple[Fingerprints, Fingerprints]  # of one step, of two runs


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
        pair = runs[0][step], runs[1][step]
        headers = pair[0].header, pair[1].header
        differences = _differences(pair, entries)
        largest[step] = float(np.max(np.nan_to_num(differences, nan=np.inf)))
        of_outputs = _output_differences(pair, outputs)
        parted = np.flatnonzero(~(differences <= tolerance)).tolist()
        if parted:
            first = parted[0]
            odd_blocks = [block for block, off in zip(outputs, of_outputs, strict=True) if not off <= noise]
            return Divergence(
                headers=headers,
                tolerance=tolerance,
                largest=largest,
                step=step,
                entry=entries[first],
                difference=float(differences[first]),
                same=entries[:first],
                likewise=[entries[index] for index in parted[1:]],
                block=odd_blocks[0] if odd_blocks else "",
                ranks=_which_ranks(pair, entries[first], tolerance),
            )
        noise = max(noise, JUMP * max(of_outputs, default=0.0))
    return Divergence(headers=headers, tolerance=tolerance, largest=largest)


def _places(run: Fingerprints, entries: Sequence[str]) -> list[int]:
    return [run.header.entries.index(entry) for entry in entries]


def _differences(pair: Pair, entries: Sequence[str]) -> Array:
    """(entries,): relative; 0 where a run has not taken one, NaN where it is not a finite number in one run alone."""
    a, b = (run.full()[_places(run, entries)] for run in pair)
    squares = np.maximum(a[:, -1], b[:, -1])
    norms = np.sqrt(np.maximum(squares, 0.0))
    for kind in (GRADIENT, WEIGHT):
        of_kind = np.array([entry.startswith(kind) for entry in entries])
        if of_kind.any():
            finite_norms = np.where(np.isfinite(norms), norms, np.nan)[of_kind]
            norms[of_kind] = np.fmax(norms[of_kind], SMALL * np.sqrt(np.nanmean(finite_norms**2)))
    result = np.sqrt(np.mean((a[:, :-1] - b[:, :-1]) ** 2, axis=1)) / np.where(norms > 0, norms, 1.0)
    finite_a, finite_b = np.isfinite(a).all(axis=1), np.isfinite(b).all(axis=1)
    result[~finite_a & ~finite_b] = 0.0
    result[finite_a != finite_b] = np.nan
    result[(a[:, -1] < 0) | (b[:, -1] < 0)] = 0.0
    return result


def _output_differences(pair: Pair, outputs: Sequence[str]) -> list[float]:
    """Of each block's output the relative difference of the sums of squares, each over the ranks that hold the same."""
    squares = [run.local.sum(axis=0)[_places(run, outputs), -1] for run in pair]
    replicas = [
        [n for n in range(1, 2 * run.header.ranks + 1) if 2 * run.header.ranks % n == 0] for run in pair
    ]  # twice: checkpointing calls a block again
    factors = np.unique(np.divide.outer(*replicas))
    result = []
    for a, b in zip(*squares, strict=True):
        if a > 0 and b > 0:
            result.append(float(np.min(np.abs(a / b / factors - 1))))
        else:
            result.append(0.0 if a == b or min(a, b) < 0 else math.inf)
    return result


def _which_ranks(pair: Pair, entry: str, tolerance: float) -> str:
    """Which ranks have other values: than those that hold the same shard, or than the same ranks of the other run."""
    square = float(np.max([run.full()[_places(run, [entry]), -1] for run in pair]))  # NaN, if one is
    limit = tolerance * (math.sqrt(square) if square > 0 else 1.0)
    for name, run in zip(("the first run", "the second run"), pair, strict=True):
        sentence = _odd_replicas(run, entry, limit, name)
        if sentence:
            return sentence
    a, b = pair
    if a.header.shards is None or a.header.shards != b.header.shards:
        return ""
    (index,) = _places(a, [entry])
    apart = np.abs(a.local[:, index, :-1] - b.local[:, index, :-1]).max(axis=1)
    holders = [rank for rank, shards in enumerate(a.header.shards) if shards[index] >= 0]
    differing = [rank for rank in holders if not apart[rank] <= limit]
    if not differing:
        return ""
    if differing == holders:
        return "every rank that holds a part of it"
    return f"rank {_listed(differing)} of the ranks {_listed(holders)} that hold a part of it"


def _odd_replicas(run: Fingerprints, entry: str, limit: float, name: str) -> str:
    """Of ranks that hold the same shard, those that have other values than most of them."""
    if run.header.shards is None:
        return ""
    (index,) = _places(run, [entry])
    shard_of = np.array(run.header.shards)[:, index]
    for shard in np.unique(shard_of[shard_of >= 0]):
        ranks = np.flatnonzero(shard_of == shard)
        values = run.local[ranks, index, :-1]
        apart = np.abs(values - np.median(values, axis=0)).max(axis=1)
        odd = ranks[~(apart <= limit)].tolist()
        if odd and 2 * len(odd) < len(ranks):
            return f"rank {_listed(odd)} of {name}: other values than {len(ranks) - len(odd)} ranks with its shard"
        if odd:
            return f"ranks {_listed(ranks.tolist())} of {name} hold the same shard, and have different values"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
