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
# For 16 bits.
TOLERANCE = 5e-2
# A gradient with a norm below this fraction of the usual norm is compared with that fraction: it may be only rounding.
SMALL = 1e-3
# A difference that is so many times larger than any before came at once.
JUMP = 10.0
# Relative noise of a block's sum of squares, unless the runs have shown more.
OUTPUT_NOISES = {"fp64": 1e-12, "fp32": 2e-5}
# For 16 bits.
OUTPUT_NOISE = 1e-2
# Ranks that a sentence names.
RANKS_NAMED = 8

Array = NDArray[np.float64]
# One step of both runs.
Pair = tuple[Fingerprints, Fingerprints]


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


def diverge(
    run_a: Path,
    run_b: Path,
    tolerance: float | None = None,
) -> Divergence:
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
    first_step = steps[0]
    headers = a_steps[first_step].header, b_steps[first_step].header
    entries = []
    outputs = []
    has_weights = False
    for entry in headers[0].entries:
        if entry not in headers[1].entries:
            continue
        if entry.startswith(OUTPUT):
            outputs.append(entry)
        else:
            entries.append(entry)
        has_weights |= entry.startswith(WEIGHT)
    if not has_weights:
        raise RecordError(f"{run_a} and {run_b} have no parameter in common: they are of different models")

    # The run with fewer bits decides what is rounding.
    dtypes = {header.dtype for header in headers}
    rounding = max(TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes)
    noise = max(OUTPUT_NOISES.get(dtype, OUTPUT_NOISE) for dtype in dtypes)
    if tolerance is None:
        tolerance = rounding
        if _promise_equal_bits(*headers):
            tolerance = 0.0
    if tolerance == 0:
        for run, fingerprints in ((run_a, a_steps), (run_b, b_steps)):
            if all(fingerprints[step].hashes is not None for step in steps):
                continue
            raise RecordError(
                f"{run} has no hashes of bits, because an older mmm has written it: compare up to rounding, with "
                f"--tolerance {rounding:g}"
            )

    largest: dict[int, float] = {}
    for step in steps:
        a = a_steps[step]
        b = b_steps[step]
        pair = a, b
        # A resumed run may continue with another layout.
        headers = a.header, b.header
        differences = _differences(pair, entries)
        # Only one run has finite numbers: no difference is larger.
        infinite_for_nan = np.nan_to_num(differences, nan=np.inf)
        largest[step] = float(np.max(infinite_for_nan))
        output_differences = _output_differences(pair, outputs)
        # NaN is not below the tolerance.
        differs = ~(differences <= tolerance)
        if tolerance == 0:
            differs = _bits_differ(pair, entries, differences, rounding)
        differing = np.flatnonzero(differs).tolist()
        if not differing:
            # These outputs are the same, so what they differ by is noise.
            shown_noise = JUMP * max(output_differences, default=0.0)
            noise = max(noise, shown_noise)
            continue

        # Entries are in the order in which a step computes them: the first has caused the others.
        first, *later = differing
        block = ""
        for output, difference in zip(outputs, output_differences, strict=True):
            if not difference <= noise:
                block = output
                break
        return Divergence(
            headers=headers,
            tolerance=tolerance,
            largest=largest,
            step=step,
            entry=entries[first],
            difference=float(differences[first]),
            same=entries[:first],
            likewise=[entries[index] for index in later],
            block=block,
            ranks=_which_ranks(pair, entries[first], tolerance),
        )
    return Divergence(headers=headers, tolerance=tolerance, largest=largest)


def _promise_equal_bits(a: Header, b: Header) -> bool:
    """Whether both runs are exact, in the same data type and with the same partition: then their bits are equal."""
    if a.exact == "":
        return False
    return a.exact == b.exact and a.dtype == b.dtype


def _bits_differ(
    pair: Pair,
    entries: Sequence[str],
    differences: Array,
    rounding: float,
) -> NDArray[np.bool_]:
    """Whether the bits of some entries differ, (entries,).

    Args:
        differences: their relative differences, (entries,).
        rounding: the largest of them that is rounding.
    """
    a, b = pair
    differs = np.zeros(len(entries), bool)
    indices = zip(_indices(a, entries), _indices(b, entries), strict=True)
    for place, (a_index, b_index) in enumerate(indices):
        a_hash = a.full_hash(a_index)
        b_hash = b.full_hash(b_index)
        # None: the ranks of a run that hold the same shard have different bits.
        differs[place] = a_hash is None or a_hash != b_hash
        # The local losses of another number of ranks are other summands: only their sum can be compared.
        is_loss = entries[place] == LOSS
        if is_loss and _summands(a, a_index) != _summands(b, b_index):
            differs[place] = not differences[place] <= rounding
    return differs


def _summands(run: Fingerprints, index: int) -> int:
    """The number of shards that an entry has."""
    shards = run.header.shards
    assert shards is not None
    # -1 stands for a rank that holds none.
    distinct = {of_rank[index] for of_rank in shards}
    distinct.discard(-1)
    return len(distinct)


def _indices(run: Fingerprints, entries: Sequence[str]) -> list[int]:
    """The indices of some entries in a run's fingerprints."""
    in_order = run.header.entries
    return [in_order.index(entry) for entry in entries]


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
        # A run that has diverged may have no finite gradient.
        finite_norms = norms[of_kind & np.isfinite(norms)]
        if finite_norms.size:
            usual = np.sqrt(np.mean(finite_norms**2))
            norms[of_kind] = np.fmax(norms[of_kind], SMALL * usual)
    norms[~(norms > 0)] = 1.0

    # inf - inf is NaN, and so is inf / inf.
    with np.errstate(invalid="ignore"):
        deltas = a[:, :-1] - b[:, :-1]
        # The projections of a difference Δ have the root mean square ‖Δ‖.
        distances = np.sqrt(np.mean(deltas**2, axis=1))
        differences: Array = distances / norms
    a_finite = np.isfinite(a).all(axis=1)
    b_finite = np.isfinite(b).all(axis=1)
    only_one = a_finite != b_finite
    none = ~(a_finite | b_finite)
    differences[none] = 0.0
    differences[only_one] = np.nan
    # A negative sum of squares says that the run did not take this entry.
    not_taken = np.minimum(a_squares, b_squares) < 0
    differences[not_taken] = 0.0
    return differences


def _output_differences(
    pair: Pair,
    outputs: Sequence[str],
) -> list[float]:
    """Relative differences of the sums of squares of each block's output.

    Each sum is over all ranks, and several ranks may hold the same output. How many is not known, so the smallest
    difference over all possible numbers counts.
    """
    squares = []
    replicas = []
    for run in pair:
        # (entries, columns)
        sums = run.local.sum(axis=0)
        indices = _indices(run, outputs)
        squares.append(sums[indices, -1])
        # Twice the ranks, since checkpointing calls a block again.
        most = 2 * run.header.ranks
        replicas.append([n for n in range(1, most + 1) if most % n == 0])
    factors = np.unique(np.divide.outer(*replicas))
    differences = []
    for a, b in zip(*squares, strict=True):
        if a > 0 and b > 0:
            ratios = a / b / factors
            off = np.abs(ratios - 1)
            differences.append(float(np.min(off)))
        elif a == b or min(a, b) < 0:
            # Negative: the run did not take this entry.
            differences.append(0.0)
        else:
            differences.append(math.inf)
    return differences


def _which_ranks(
    pair: Pair,
    entry: str,
    tolerance: float,
) -> str:
    """A sentence on the ranks that have other values.

    They are compared with ranks that hold the same shard, and with the same ranks of the other run.
    """
    a, b = pair
    (a_index,) = _indices(a, [entry])
    (b_index,) = _indices(b, [entry])
    norm = 1.0
    # It is NaN if one of the runs has NaN.
    square = float(np.maximum(a.full()[a_index, -1], b.full()[b_index, -1]))
    if 0 < square < math.inf:
        norm = math.sqrt(square)
    limit = tolerance * norm
    for run, name in ((a, "the first run"), (b, "the second run")):
        sentence = _odd_replicas(run, entry, limit, name)
        if sentence:
            return sentence

    shards = a.header.shards
    if shards is None or shards != b.header.shards:
        return ""
    # differs: (ranks,)
    if tolerance == 0:
        assert a.hashes is not None
        assert b.hashes is not None
        differs = a.hashes[:, a_index] != b.hashes[:, b_index]
    else:
        # (ranks, projections)
        a_sums = a.local[:, a_index, :-1]
        b_sums = b.local[:, b_index, :-1]
        # inf - inf is NaN.
        with np.errstate(invalid="ignore"):
            deltas = np.abs(a_sums - b_sums)
        distance = deltas.max(axis=1)
        differs = ~(distance <= limit)
    holders = []
    differing = []
    for rank, of_rank in enumerate(shards):
        # A pipeline rank holds only the tensors of its stages.
        if of_rank[a_index] < 0:
            continue
        holders.append(rank)
        if differs[rank]:
            differing.append(rank)
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
    # (ranks, entries)
    shards = np.array(run.header.shards)
    # (ranks,): the number of the shard that each rank holds; negative if it holds none.
    shard_of = shards[:, index]
    held = shard_of[shard_of >= 0]
    for shard in np.unique(held):
        ranks = np.flatnonzero(shard_of == shard)
        if limit == 0:
            assert run.hashes is not None
            hashes = run.hashes[ranks, index]
            distinct, counts = np.unique(hashes, return_counts=True)
            most_common = distinct[counts.argmax()]
            is_odd = hashes != most_common
        else:
            # (ranks of the shard, projections)
            sums = run.local[ranks, index, :-1]
            finite = np.isfinite(sums).all(axis=1)
            # NaN or inf on every rank: they agree.
            if not finite.any():
                continue
            values = sums[finite]
            deltas = np.abs(values - np.median(values, axis=0))
            distance = deltas.max(axis=1)
            is_odd = np.ones(len(ranks), bool)
            is_odd[finite] = ~(distance <= limit)
        odd = ranks[is_odd].tolist()
        # Only a majority tells which ranks are wrong.
        if odd and 2 * len(odd) < len(ranks):
            n_agree = len(ranks) - len(odd)
            return f"rank {_listed(odd)} of {name}: other values than {n_agree} ranks with its shard"
        if odd:
            return f"ranks {_listed(ranks.tolist())} of {name} hold the same shard, and have different values"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:RANKS_NAMED]))
    n_more = len(ranks) - RANKS_NAMED
    if n_more > 0:
        text += f" and {n_more} more"
    return text
