"""--profile: a trace of each rank."""

import gzip
import json
from unittest.mock import patch

import pytest

from mmm.errors import ConfigError
from mmm.history import load
from mmm.run.command_line import configure
from mmm.trainer import lm
from support.pool import program_on

FLAGS = {"preset": "debug", "seq_length": 16, "plots": False, "device": "cpu", "eval_batches": 1, "max_iters": 4}


def train(outdir, **flags):
    lm.train(configure(lm.Config, **{**FLAGS, "outdir": outdir, **flags}))
    return json.loads((outdir / "config.json").read_text())


def train_on(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **{**FLAGS, "outdir": outdir, **flags}))


def trace_of(outdir, rank):
    return json.loads(gzip.decompress((outdir / "traces" / f"rank-{rank}.json.gz").read_bytes()))


@pytest.mark.long
def test_each_rank_writes_pytorchs_trace(run_on_ranks, tmp_path):
    flags = {"tpsize": 2, "global_batch_size": 4, "profile": True, "profile_steps": (1, 3)}
    run_on_ranks(train_on, 2, tmp_path, flags)
    for rank in range(2):
        trace = trace_of(tmp_path, rank)
        # By which HTA knows whose it is.
        assert trace["distributedInfo"]["rank"] == rank
        names = {event["name"] for event in trace["traceEvents"]}
        assert "aten::mm" in names
        assert any(name.startswith("gloo:") for name in names)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["profile"] == {
        "steps": [1, 3],
        "files": ["traces/rank-0.json.gz", "traces/rank-1.json.gz"],
        "ranks": [0, 1],
    }
    without = {name: value for name, value in flags.items() if not name.startswith("profile")}
    run_on_ranks(train_on, 2, tmp_path / "without", without)
    assert load(tmp_path).loss.values.tolist() == load(tmp_path / "without").loss.values.tolist()


def train_with_two_profiles(rank, *args):
    with patch("mmm.run.hooks.profile.MOST_RANKS", 2):
        train_on(rank, *args)


@pytest.mark.long
def test_no_more_ranks_than_the_first(run_on_ranks, tmp_path):
    flags = {"global_batch_size": 4, "profile": True, "profile_steps": (1, 2)}
    run_on_ranks(train_with_two_profiles, 4, tmp_path, flags)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    assert "2 of 4 ranks" in (tmp_path / "log.txt").read_text()


def test_overwriting_a_run_removes_its_traces(tmp_path):
    train(tmp_path, profile=True, batch_size=2)
    (tmp_path / "traces" / "mine.json").write_text("{}")
    train(tmp_path, overwrite=True, batch_size=2)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["mine.json"]


def test_steps_that_the_run_has_not(tmp_path):
    train(tmp_path, profile=True, profile_steps=(7, 9), batch_size=2)
    assert not (tmp_path / "traces").exists()
    assert "--profile_steps (7, 9): none of them is among the steps 0 to 3" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"profile_steps": (1, 2)}, "without --profile: nothing is profiled"),
        ({"profile": True, "profile_steps": (2, 1)}, "--profile_steps 2 1: give"),
    ],
)
def test_flags_that_are_wrong(flags, message):
    with pytest.raises(ConfigError, match=message):
        configure(lm.Config, **flags).check()
