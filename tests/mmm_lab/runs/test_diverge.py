"""Where two runs part, which ranks are named, and how runs without fingerprints are compared."""

import math

import pytest

from mmm.history import History, write_config
from mmm.history.record.fingerprints import FingerprintFile, Header
from mmm_lab.cli.main import main as mmm
from mmm_lab.runs.diverge import diverge

GRADIENT = "gradient of w"


def written(folder, gradients, checksums=None, exact=None, layout=None):
    """The fingerprints of a step under DDP: each rank holds all, and its gradient has one number.

    Args:
        checksums: of the bits of each rank's gradient; None: equal ones.
    """
    n_ranks = len(gradients)
    folder.mkdir()
    replicas = {"loss": n_ranks, GRADIENT: n_ranks, "weight w": n_ranks}
    header = Header(layout or f"dp{n_ranks}", "fp64", n_ranks, replicas, exact)
    ranks = []
    for gradient, checksum in zip(gradients, checksums or [0] * n_ranks, strict=True):
        ranks.append({"loss": [1.0, 1.0, 0], GRADIENT: [gradient, gradient**2, checksum], "weight w": [1.0, 1.0, 0]})
    FingerprintFile(folder, 0, header).append(0, ranks)
    return folder


@pytest.mark.parametrize(
    ("gradients", "ranks"),
    [
        ([1.0, 1.0, 1.0, 5.0], "rank 3 of the ranks 0, 1, 2, 3 that hold a part of it"),
        # A norm does not see the sign.
        ([1.0, -1.0], "rank 1 of the ranks 0, 1 that hold a part of it"),
        ([1.0, math.nan, 1.0], "rank 1 of the ranks 0, 1, 2 that hold a part of it"),
        ([1.0, math.inf, 1.0], "rank 1 of the ranks 0, 1, 2 that hold a part of it"),
        ([math.nan, math.nan], "every rank that holds a part of it"),
    ],
    ids=["one of four", "sign", "NaN", "inf", "NaN on all"],
)
def test_the_ranks_with_other_values_are_named_if_the_layouts_are_the_same(tmp_path, gradients, ranks):
    right = [1.0] * len(gradients)
    wrong = written(tmp_path / "wrong", gradients)
    result = diverge(written(tmp_path / "right", right), wrong)
    assert result.entry == GRADIENT
    assert result.ranks == ranks
    other_layout = written(tmp_path / "other", right, layout="tp")
    assert diverge(other_layout, wrong).ranks == ""


def test_bits_decide_where_no_tolerance_is_left(tmp_path):
    """The sums are equal, as where two elements differ by rounding that a sum drops: the checksums are not."""
    a = written(tmp_path / "a", [1.0] * 3, [7, 7, 7])
    b = written(tmp_path / "b", [1.0] * 3, [7, 9, 7])
    assert diverge(a, b).step is None
    result = diverge(a, b, 0.0)
    assert (result.step, result.entry) == (0, GRADIENT)
    assert 0 < result.difference < 1e-15
    assert result.ranks == "rank 1 of the ranks 0, 1, 2 that hold a part of it"
    assert diverge(a, a, 0.0).step is None


def test_exact_runs_are_compared_by_bits(tmp_path):
    a = written(tmp_path / "a", [1.0], [7], exact=4)
    b = written(tmp_path / "b", [1.0] * 2, [9, 9], exact=4)
    result = diverge(a, b)
    assert (result.tolerance, result.entry) == (0.0, GRADIENT)
    # A checksum that two ranks hold counts once.
    same = written(tmp_path / "same", [1.0] * 2, [7, 7], exact=4)
    assert diverge(a, same).step is None
    # Another partition has other bits: they are only compared up to rounding.
    other = written(tmp_path / "other", [1.0], [9], exact=8)
    assert diverge(a, other).step is None


def record(folder, rows, precision="fp32"):
    """The record of a run of one rank: rows of columns."""
    folder.mkdir()
    write_config(folder, {"layout": "1", "precision": {"name": precision}})
    with History(folder, ranks=[{"rank": 0}]) as history:
        for step, row in enumerate(rows):
            history.update({"iter": step, "dt": 0.1 * step, **row})
    return folder


# The losses of a run, of which another departs.
CURVE = [4.0, 3.0, 2.5, 2.0]


@pytest.mark.parametrize(
    ("losses", "code", "says"),
    [
        (CURVE, 0, ["the same losses: 4 steps", "only loss", "--fingerprints 1"]),
        ([4.0, 3.001, 2.501, 2.001], 0, ["the same losses"]),
        # 0.02 of 2.52.
        ([4.0, 3.0, 2.52, 3.0], 1, ["part at step 2, at the loss: off by 7.9e-03, 2.5 and 2.52"]),
        ([4.0, 3.0, math.nan, 2.0], 1, ["part at step 2, at the loss: off by inf, 2.5 and nan"]),
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
    assert "not both runs have fingerprints" in capsys.readouterr().out


def test_a_program_s_own_columns_stand_for_the_loss(tmp_path):
    a = record(tmp_path / "a", [{"energy": -3.0}])
    b = record(tmp_path / "b", [{"energy": -3.1}])
    c = record(tmp_path / "c", [{"mass": 1.0}])
    assert mmm(["diverge", str(a), str(b)]) == 1
    assert mmm(["diverge", str(a), str(c)]) == 2
