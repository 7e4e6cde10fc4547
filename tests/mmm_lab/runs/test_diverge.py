"""Which ranks are named where those with the same shard have different values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mmm.errors import RecordError
from mmm.history import History, write_config
from mmm.history.record.fingerprints import HASH_COLUMNS, FingerprintFile, Header
from mmm_lab.cli.main import main as mmm
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


def record(folder, rows, precision="fp32"):
    """The record of a run of one rank: rows of columns."""
    folder.mkdir()
    write_config(folder, {"layout": "1", "precision": {"name": precision}})
    with History(folder, ranks=[{"rank": 0}]) as history:
        for step, row in enumerate(rows):
            history.update({"iter": step, "dt": 0.1 * step, **row})
    return folder


CURVE = [4.0, 3.0, 2.5, 2.0]


@pytest.mark.parametrize(
    ("losses", "code", "says"),
    [
        (CURVE, 0, ["the same losses: 4 steps", "only loss", "--fingerprints 1"]),
        ([4.0, 3.001, 2.501, 2.001], 0, ["the same losses"]),
        # 0.02 of 2.52 at first, 1 of 3 at most.
        ([4.0, 3.0, 2.52, 3.0], 1, ["part at step 2: loss is 2.5 and 2.52, off by 7.9e-03", "3.3e-01 at step 3"]),
        ([4.0, 3.0, math.nan, 2.0], 1, ["part at step 2: loss is 2.5 and nan"]),
        ([4.0, 3.0, 2.5, 2.0, 1.0], 0, ["the same losses: 4 steps"]),
    ],
    ids=["equal", "rounding", "other", "NaN", "longer"],
)
def test_runs_without_fingerprints_are_compared_by_their_losses(tmp_path, capsys, losses, code, says):
    a = record(tmp_path / "a", [{"loss": loss} for loss in CURVE])
    b = record(tmp_path / "b", [{"loss": loss, "dt_own": 7.0} for loss in losses])
    assert mmm(["diverge", str(a), str(b)]) == code
    out = capsys.readouterr().out
    for text in says:
        assert text in out


def test_losses_are_the_same_up_to_the_rounding_of_the_runs_or_to_what_is_asked(tmp_path, capsys):
    """1e-5 is rounding in float32 and none in float64. A NaN of both is the same; so is a missing evaluation."""
    rows = [{"loss": 1.0, "val_loss": 1.0}, {"loss": math.nan}]
    others = [{"loss": 1.00001}, {"loss": math.nan, "val_loss": 2.0}]
    for precision, code in (("fp32", 0), ("fp64", 1)):
        a = record(tmp_path / f"a {precision}", rows, precision)
        b = record(tmp_path / f"b {precision}", others, precision)
        assert mmm(["diverge", str(a), str(b)]) == code
    assert mmm(["diverge", str(a), str(b), "--tolerance", "1e-4"]) == 0
    assert "no fingerprints in" in capsys.readouterr().out


def test_a_program_s_own_columns_stand_for_the_loss(tmp_path):
    a = record(tmp_path / "a", [{"energy": -3.0}])
    b = record(tmp_path / "b", [{"energy": -3.1}])
    c = record(tmp_path / "c", [{"mass": 1.0}])
    assert mmm(["diverge", str(a), str(b)]) == 1
    assert mmm(["diverge", str(a), str(c)]) == 2
