"""A record of a loop that is not ours: rank 0 keeps what every rank gives, and all of them hear that it cannot."""

import pytest

from mmm.errors import RecordError
from mmm.history import RankHistory, load


def loop(rank, outdir):
    """Three rows, in which each rank has a loss of its own; then a second history in the same folder."""
    history = RankHistory(outdir)
    for step in range(3):
        history.update({"iter": step}, loss=10.0 * step + rank.rank)
    history.close()
    with pytest.raises(RecordError, match="already holds rows"):
        RankHistory(outdir)
    return True


def test_rank_0_keeps_the_values_of_every_rank(run_on_ranks, tmp_path):
    """A mistake that only rank 0 hears would have the others wait for it for ever."""
    assert run_on_ranks(loop, 2, tmp_path / "runs") == [True, True]
    loss = load(tmp_path / "runs").loss
    assert loss.dims == ("draw", "rank")
    assert loss.values.tolist() == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]


def test_one_process_needs_no_process_group(tmp_path):
    history = RankHistory(tmp_path / "runs")
    history.update({"iter": 0}, loss=1.5)
    history.close()
    assert load(tmp_path / "runs").loss.values.tolist() == [[1.5]]
