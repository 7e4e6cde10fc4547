"""Which ranks are named where those with the same shard have different values."""

import numpy as np
import pytest

from mmm.history.record.fingerprints import FingerprintFile, Header
from mmm_lab.runs.diverge import diverge

ENTRIES = ["loss", "gradient of w", "weight w"]


def written(folder, gradients):
    """The fingerprints of a step under DDP: each rank holds all, and its gradient has one number."""
    ranks = len(gradients)
    folder.mkdir()
    local = np.ones((ranks, len(ENTRIES), 2))  # (ranks, entries, columns): a number, and its square
    local[:, 1, 0] = gradients
    local[:, 1, 1] = np.square(gradients)
    header = Header(ENTRIES, 2, f"dp{ranks}", "fp64", ranks, [ranks] * 3, [[0, 0, 0]] * ranks)
    FingerprintFile(folder, 0, header).append(0, local)
    return folder


@pytest.mark.parametrize(
    ("gradients", "ranks"),
    [
        ([1.0, 1.0, 1.0, 5.0], "rank 3 of the second run: other values than 3 ranks with its shard"),
        ([1.0, 1.0, 4.0, -7.0], "ranks 0, 1, 2, 3 of the second run hold the same shard, and have different values"),
        ([1.0, 5.0], "ranks 0, 1 of the second run hold the same shard, and have different values"),
    ],
    ids=["one of four", "as many as agree", "one of two"],
)
def test_only_a_majority_says_which_ranks_are_wrong(tmp_path, gradients, ranks):
    result = diverge(written(tmp_path / "a", [1.0] * len(gradients)), written(tmp_path / "b", gradients))
    assert result.entry == "gradient of w"
    assert result.ranks == ranks
