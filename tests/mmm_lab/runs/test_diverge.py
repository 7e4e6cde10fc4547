"""Which ranks are named where those with the same shard have different values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mmm.errors import RecordError
from mmm.history.record.fingerprints import HASH_COLUMNS, FingerprintFile, Header
from mmm_lab.runs.diverge import diverge

ENTRIES = ["loss", "gradient of w", "weight w"]


def written(folder, gradients, bits=None, exact=""):
    """The fingerprints of a step under DDP: each rank holds all, and its gradient has one number.

    Args:
        bits: hash of each rank's gradient; "none": a record without hashes, as version 1 wrote it.
    """
    ranks = len(gradients)
    folder.mkdir()
    local = np.ones((ranks, len(ENTRIES), 2))  # (ranks, entries, columns): a number, and its square
    local[:, 1, 0] = gradients
    local[:, 1, 1] = np.square(gradients)
    hashes = np.zeros((ranks, len(ENTRIES), HASH_COLUMNS))
    if isinstance(bits, list):
        hashes[:, 1, 0] = bits
    rows = np.concatenate((local, hashes), axis=-1)
    header = Header(ENTRIES, 2, f"dp{ranks}", "fp64", ranks, [ranks] * 3, [[0, 0, 0]] * ranks, exact=exact)
    if bits == "none":
        header = replace(header, version=1)
        rows = local
    FingerprintFile(folder, 0, header).append(0, rows)
    return folder


@pytest.mark.parametrize(
    ("gradients", "ranks"),
    [
        ([1.0, 1.0, 1.0, 5.0], "rank 3 of the second run: other values than 3 ranks with its shard"),
        ([1.0, 1.0, 4.0, -7.0], "ranks 0, 1, 2, 3 of the second run hold the same shard, and have different values"),
        ([1.0, 5.0], "ranks 0, 1 of the second run hold the same shard, and have different values"),
        ([1.0, 1.0, math.nan, 1.0], "rank 2 of the second run: other values than 3 ranks with its shard"),
        ([1.0, math.inf, 1.0], "rank 1 of the second run: other values than 2 ranks with its shard"),
        ([math.nan, math.nan], "every rank that holds a part of it"),
        ([math.inf, math.inf], "every rank that holds a part of it"),
    ],
    ids=["one of four", "as many as agree", "one of two", "NaN", "inf", "NaN on all", "inf on all"],
)
def test_only_a_majority_says_which_ranks_are_wrong(tmp_path, gradients, ranks):
    result = diverge(written(tmp_path / "a", [1.0] * len(gradients)), written(tmp_path / "b", gradients))
    assert result.entry == "gradient of w"
    assert result.ranks == ranks


def test_bits_decide_where_no_tolerance_is_left(tmp_path):
    """The sums are equal, as where two elements differ by rounding that a sum drops: the hashes are not."""
    a = written(tmp_path / "a", [1.0] * 3, [7, 7, 7])
    b = written(tmp_path / "b", [1.0] * 3, [7, 9, 7])
    assert diverge(a, b).step is None
    result = diverge(a, b, 0.0)
    assert (result.step, result.entry, result.difference) == (0, "gradient of w", 0.0)
    assert result.ranks == "rank 1 of the second run: other values than 2 ranks with its shard"
    assert diverge(a, a, 0.0).step is None


def test_exact_runs_are_compared_by_bits(tmp_path):
    a = written(tmp_path / "a", [1.0], [7], exact="4")
    b = written(tmp_path / "b", [1.0] * 2, [9, 9], exact="4")
    result = diverge(a, b)
    assert (result.tolerance, result.entry) == (0.0, "gradient of w")
    # Another partition has other bits: they are only compared up to rounding.
    other = written(tmp_path / "other", [1.0], [9], exact="8")
    assert diverge(a, other).step is None


def test_a_record_without_hashes(tmp_path):
    a = written(tmp_path / "a", [1.0], "none")
    b = written(tmp_path / "b", [1.0], [7])
    assert diverge(a, b).step is None
    with pytest.raises(RecordError, match=r"no hashes .* --tolerance 1e-09"):
        diverge(b, a, 0.0)
