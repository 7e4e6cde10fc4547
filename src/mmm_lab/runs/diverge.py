"""Finds where two runs part: the first step, and in it the first of batch, loss, gradients in backward order, weights.

The runs may have different layouts, because their fingerprints are compared (`mmm.parallel.fingerprint`). If two
tensors differ by Δ, their fingerprints differ by about the norm of Δ. So differences are relative to the tensor's norm.

With a tolerance of 0 the hashes of their bits are compared as well: then no difference is too small to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmm.errors import RecordError
from mmm.history.record.fingerprints import (
    GRADIENT,
    LOSS,
    OUTPUT,
    WEIGHT,
    Fingerprints,
    Header,
    read_fingerprints,
)

# Adam's first steps turn the rounding of float32 into 1e-4.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3}
TOLERANCE = 5e-2  # for 16 bits
# A gradient with a norm below this fraction of the usual norm is compared with that fraction: it may be only rounding.
SMALL = 1e-3
JUMP = 10.0  # a difference that is so many times larger than any before came at once
# Relative noise of a block's sum of squares, unless the runs have shown more.
OUTPUT_NOISE = {"fp64": 1e-12, "fp32": 2e-5}

Array = NDArray[np.float64]
Pair = tuple[Fingerprints, Fingerprints]  # one step of both runs


@dataclass(frozen=True)
class Divergence:
    """What was compared, and where the runs part.

    Attributes:
        headers: headers of the two runs.
        tolerance: the largest relative difference at which two values count as the same; 0 if their bits were
            compared.
        largest: the largest relative difference of each step, up to the step where the runs part.
        step: step where they part; None if they do not, -1 if they differ from the beginning.
        entry: name of the first value that differs in that step; None if the runs do not part.
        difference: relative difference of that value.
        same: values of that step that come before it, and are the same.
        likewise: values of that step that come after it, and differ too.
        block: the first block with a different output, if the loss differs; else empty.
        ranks: a sentence on the ranks that have other values; empty if nothing can be said.
    """

    headers: tuple[Header, Header]
    tolerance: float
    largest: Mapping[int, float]
    step: int | None = None
    entry: str | None = None
    difference: float = 0.0
    same: Sequence[str] = ()
    likewise: Sequence[str] = ()
    block: str = ""
    ranks: str = ""

    @property
    def at_once(self) -> bool:
        """Whether the difference came in one step. That of rounding grows over many steps."""
        before = [largest for step, largest in self.largest.items() if step != self.step]
        return not before or self.difference > JUMP * max(before)


def diverge(run_a: Path, run_b: Path, tolerance: float | None = None) -> Divergence:
    """Compare the fingerprints of two runs.

    Args:
        tolerance: the largest relative difference that counts as none; 0: the bits have to be equal. By default 0 for
            two exact runs of one canonical partition; else 1e-9 if both runs are in float64, 1e-3 in float32, and 0.05
            otherwise.

    Raises:
        RecordError: a run has no fingerprints, or none of its bits; or the two runs have no step or no parameter in
            common.
    """
    a_steps = read_fingerprints(run_a)
    b_steps = read_fingerprints(run_b)
    steps = [step for step in a_steps if step in b_steps]
    if not steps:
        raise RecordError(f"{run_a} and {run_b} have no step with fingerprints in common")
    headers = a_steps[steps[0]].header, b_steps[steps[0]].header
    common = [entry for entry in headers[0].entries if entry in headers[1].entries]
    entries = [entry for entry in common if not entry.startswith(OUTPUT)]
    outputs = [entry for entry in common if entry.startswith(OUTPUT)]
    if not any(entry.startswith(WEIGHT) for entry in entries):
        raise RecordError(f"{run_a} and {run_b} have no parameter in common: they are of different models")
    rounding = max(TOLERANCES.get(header.dtype, TOLERANCE) for header in headers)
    if tolerance is None:
        tolerance = 0.0 if _promise_equal_bits(*headers) else rounding
    if tolerance == 0:
        for run, fingerprints in ((run_a, a_steps), (run_b, b_steps)):
            if any(fingerprints[step].hashes is None for step in steps):
                raise RecordError(
                    f"{run} has no hashes of bits, because an older mmm has written it: compare up to rounding, with "
                    f"--tolerance {rounding:g}"
                )
    largest: dict[int, float] = {}
    noise = max(OUTPUT_NOISE.get(header.dtype, 1e-2) for header in headers)
    for step in steps:
        a = a_steps[step]
        b = b_steps[step]
        pair = a, b
        headers = a.header, b.header
        differences = _differences(pair, entries)
        largest[step] = float(np.max(np.nan_to_num(differences, nan=np.inf)))
        block_differences = dict(zip(outputs, _output_differences(pair, outputs), strict=True))
        # NaN is not below the tolerance.
        differs = ~(differences <= tolerance)
        if tolerance == 0:
            differs = _bits_differ(pair, entries, differences, rounding)
        differing = np.flatnonzero(differs).tolist()
        if differing:
            first = differing[0]
            odd_blocks = [block for block, off in block_differences.items() if not off <= noise]
            return Divergence(
                headers=headers,
                tolerance=tolerance,
                largest=largest,
                step=step,
                entry=entries[first],
                difference=float(differences[first]),
                same=entries[:first],
                likewise=[entries[index] for index in differing[1:]],
                block=odd_blocks[0] if odd_blocks else "",
                ranks=_which_ranks(pair, entries[first], tolerance),
            )
        # These outputs are the same, so that what they differ by is noise.
        noise = max(noise, JUMP * max(block_differences.values(), default=0.0))
    return Divergence(headers=headers, tolerance=tolerance, largest=largest)


def _promise_equal_bits(a: Header, b: Header) -> bool:
    """Whether both runs are exact, in the same data type and with the same partition: then their bits are equal."""
    return a.exact != "" and (a.exact, a.dtype) == (b.exact, b.dtype)


def _bits_differ(pair: Pair, entries: Sequence[str], differences: Array, rounding: float) -> NDArray[np.bool_]:
    """Whether the bits of some entries differ, (entries,).

    Args:
        differences: their relative differences, (entries,).
        rounding: the largest of them that is rounding.
    """
    differs = np.zeros(len(entries), bool)
    for place, entry in enumerate(entries):
        a_index, b_index = (run.header.entries.index(entry) for run in pair)
        a, b = pair
        a_hash = a.full_hash(a_index)
        differs[place] = a_hash is None or a_hash != b.full_hash(b_index)
        # The local losses of another number of ranks are other summands: only their sum can be compared.
        if entry == LOSS and _summands(a, a_index) != _summands(b, b_index):
            differs[place] = not differences[place] <= rounding
    return differs


def _summands(run: Fingerprints, index: int) -> int:
    """The number of shards that an entry has."""
    assert run.header.shards is not None
    return len({shards[index] for shards in run.header.shards} - {-1})


def _indices(run: Fingerprints, entries: Sequence[str]) -> list[int]:
    """The indices of some entries in a run's fingerprints."""
    return [run.header.entries.index(entry) for entry in entries]


def _differences(pair: Pair, entries: Sequence[str]) -> Array:
    """Relative differences of some entries, (entries,).

    A difference is 0 if a run did not take the entry, and NaN if only one of the runs has finite numbers there.
    """
    # (entries, projections + 1): random projections of a tensor, and at last the sum of its squares.
    a, b = (run.full()[_indices(run, entries)] for run in pair)
    a_squares = a[:, -1]
    b_squares = b[:, -1]
    squares = np.maximum(a_squares, b_squares)
    norms = np.sqrt(np.maximum(squares, 0.0))
    for kind in (GRADIENT, WEIGHT):
        of_kind = np.array([entry.startswith(kind) for entry in entries])
        if of_kind.any():
            kind_norms = norms[of_kind]
            finite_norms = np.where(np.isfinite(kind_norms), kind_norms, np.nan)
            usual = np.sqrt(np.nanmean(finite_norms**2))
            norms[of_kind] = np.fmax(kind_norms, SMALL * usual)
    distances = np.sqrt(np.mean((a[:, :-1] - b[:, :-1]) ** 2, axis=1))
    differences = distances / np.where(norms > 0, norms, 1.0)
    finite_a = np.isfinite(a).all(axis=1)
    finite_b = np.isfinite(b).all(axis=1)
    differences[~finite_a & ~finite_b] = 0.0
    differences[finite_a != finite_b] = np.nan
    # A negative sum of squares says that the run did not take this entry.
    differences[(a_squares < 0) | (b_squares < 0)] = 0.0
    return differences


def _output_differences(pair: Pair, outputs: Sequence[str]) -> list[float]:
    """Relative differences of the sums of squares of each block's output.

    Each sum is over all ranks, and several ranks may hold the same output. How many is not known, so the smallest
    difference over all possible numbers counts.
    """
    # (outputs,) of each run
    a_squares, b_squares = (run.local.sum(axis=0)[_indices(run, outputs), -1] for run in pair)
    # Twice the ranks, since checkpointing calls a block again.
    a_replicas, b_replicas = (_divisors(2 * run.header.ranks) for run in pair)
    factors = np.unique(np.divide.outer(a_replicas, b_replicas))
    differences = []
    for a, b in zip(a_squares, b_squares, strict=True):
        if a > 0 and b > 0:
            ratios = a / b / factors
            differences.append(float(np.min(np.abs(ratios - 1))))
        elif a == b or min(a, b) < 0:
            differences.append(0.0)
        else:
            differences.append(math.inf)
    return differences


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _which_ranks(pair: Pair, entry: str, tolerance: float) -> str:
    """A sentence on the ranks that have other values.

    They are compared with ranks that hold the same shard, and with the same ranks of the other run.
    """
    # It is NaN if one of the runs has NaN.
    square = float(np.max([run.full()[_indices(run, [entry]), -1] for run in pair]))
    limit = tolerance * (math.sqrt(square) if square > 0 else 1.0)
    for name, run in zip(("the first run", "the second run"), pair, strict=True):
        sentence = _odd_replicas(run, entry, limit, name)
        if sentence:
            return sentence
    a, b = pair
    if a.header.shards is None or a.header.shards != b.header.shards:
        return ""
    (index,) = _indices(a, [entry])
    # (ranks,)
    if tolerance == 0:
        assert a.hashes is not None
        assert b.hashes is not None
        differs = a.hashes[:, index] != b.hashes[:, index]
    else:
        distance = np.abs(a.local[:, index, :-1] - b.local[:, index, :-1]).max(axis=1)
        differs = ~(distance <= limit)
    # A pipeline rank holds only the tensors of its stages.
    holders = [rank for rank, shards in enumerate(a.header.shards) if shards[index] >= 0]
    differing = [rank for rank in holders if differs[rank]]
    if not differing:
        return ""
    if differing == holders:
        return "every rank that holds a part of it"
    return f"rank {_listed(differing)} of the ranks {_listed(holders)} that hold a part of it"


def _odd_replicas(
    run: Fingerprints,
    entry: str,
    limit: float,
    name: str,
) -> str:
    """A sentence on ranks that have other values than most ranks with the same shard.

    Args:
        limit: the largest difference of two sums that counts as none; 0: the bits have to be equal.
    """
    if run.header.shards is None:
        return ""
    (index,) = _indices(run, [entry])
    # (ranks,): the number of the shard that each rank holds; negative if it holds none.
    shard_of = np.array(run.header.shards)[:, index]
    for shard in np.unique(shard_of[shard_of >= 0]):
        ranks = np.flatnonzero(shard_of == shard)
        if limit == 0:
            assert run.hashes is not None
            hashes = run.hashes[ranks, index]
            distinct, counts = np.unique(hashes, return_counts=True)
            is_odd = hashes != distinct[counts.argmax()]
        else:
            values = run.local[ranks, index, :-1]
            distance = np.abs(values - np.median(values, axis=0)).max(axis=1)
            is_odd = ~(distance <= limit)
        odd = ranks[is_odd].tolist()
        # Only a majority tells which ranks are wrong.
        if odd and 2 * len(odd) < len(ranks):
            return f"rank {_listed(odd)} of {name}: other values than {len(ranks) - len(odd)} ranks with its shard"
        if odd:
            return f"ranks {_listed(ranks.tolist())} of {name} hold the same shard, and have different values"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        text += f" and {len(ranks) - 8} more"
    return text
