"""--profile: one trace of all ranks of a run; a page of Python's calls; what fails costs a warning."""

import gzip
import json
import time
from collections import Counter

import pytest
import torch

from mmm.errors import ConfigError
from mmm.history import load
from mmm.trainer import lm
from mmm.trainer.config import profile
from mmm.trainer.config.command_line import configure
from mmm.trainer.loop.profile import clock_offset
from support.pool import program_on
from support.traces import check_for_perfetto, flows

FLAGS = {"preset": "debug", "seq_length": 16, "plots": False, "device": "cpu", "eval_batches": 1, "max_iters": 4}


def train(outdir, **flags):
    lm.train(configure(lm.Config, **{**FLAGS, "outdir": outdir, **flags}))
    return json.loads((outdir / "config.json").read_text())


def train_on(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **{**FLAGS, "outdir": outdir, **flags}))


def read(outdir):
    return json.loads(gzip.decompress((outdir / "trace.json.gz").read_bytes()))


def check_trace(outdir, ranks, steps):
    """Every call between the ranks has its arrow; every rank its row, with the parts of its steps."""
    trace, config = read(outdir), json.loads((outdir / "config.json").read_text())
    check_for_perfetto(trace)
    said = config["profile"]
    assert (said["file"], said["ranks"], said["missing"], said["backwards"]) == (
        "trace.json.gz",
        list(range(ranks)),
        0,
        0,
    )
    ours = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"].startswith("mmm,")]
    kinds = Counter((event["pid"], event["cat"].removeprefix("mmm,")) for event in ours)
    for rank in range(ranks):
        assert kinds[rank, "step"] == steps
        assert all(kinds[rank, part] >= steps for part in ("dtf", "dtb", "dto", "collective", "wait"))
        assert any(e["pid"] == rank and e["name"] == "aten::mm" for e in trace["traceEvents"])
    joined = Counter(
        name for _, name, _ in flows({"traceEvents": [e for e in trace["traceEvents"] if e.get("cat") == "mmm"]})
    )
    assert (joined["collective"], joined["send"]) == (said["collectives"], said["transfers"])
    return trace, ours, kinds, joined


def test_the_trace_of_a_pipeline_on_four_ranks(run_on_ranks, tmp_path):
    flags = {"pp": 2, "tpsize": 2, "global_batch_size": 4, "microbatches": 2}
    run_on_ranks(train_on, 4, tmp_path, {**flags, "profile": "torch", "profile_steps": "1:3"})
    trace, ours, kinds, joined = check_trace(tmp_path, 4, 2)
    assert joined["send"] == 2 * 2 * 2 * 2  # steps, micro-batches, there and back, tp
    assert sum(kinds[rank, "send"] for rank in range(4)) == joined["send"]
    for rank in range(4):
        names = {event["name"] for event in ours if event["pid"] == rank}
        assert {"forward F0", "forward F1", "backward B0", "backward B1", "waiting", "step 1", "step 2"} <= names
    named = [e["args"] for e in trace["traceEvents"] if e["name"] in ("process_name", "process_labels")]
    assert named[0] == {"name": "rank 0 · pp0 tp0"}
    assert named[1]["labels"]


@pytest.mark.long
def test_no_more_ranks_than_asked_for(run_on_ranks, tmp_path):
    flags = {"global_batch_size": 4, "profile": "torch", "profile_steps": "1:2", "profile_ranks": 2}
    run_on_ranks(train_on, 4, tmp_path, flags)
    trace = read(tmp_path)
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    check_for_perfetto(trace)
    assert "--profile_ranks takes more" in (tmp_path / "log.txt").read_text()
    check_trace(tmp_path, 2, 1)


@pytest.mark.long
def test_the_trace_of_eight_ranks(run_on_ranks, tmp_path):
    flags = {
        "pp": 2,
        "tpsize": 2,
        "global_batch_size": 8,
        "microbatches": 4,
        "profile": "torch",
        "profile_steps": "1:3",
    }
    run_on_ranks(train_on, 8, tmp_path, {**flags, "plots": True})
    _, ours, _, joined = check_trace(tmp_path, 8, 2)
    assert joined["send"] == 2 * 4 * 2 * 4  # steps, micro-batches, there and back, pipelines
    waits = [e["dur"] for e in ours if e["cat"] == "mmm,dtw" and e["pid"] >= 4]
    without = {name: value for name, value in flags.items() if not name.startswith("profile")}
    run_on_ranks(train_on, 8, tmp_path / "without", without)
    assert load(tmp_path).loss.values.tolist() == load(tmp_path / "without").loss.values.tolist()
    assert max(waits) > 1000  # µs: the second stage waits for the first
    assert (tmp_path / "trace.png").stat().st_size > 50_000


@pytest.mark.parametrize("broken", [pytest.param("start", marks=pytest.mark.long), "stop"])
def test_a_profile_that_fails_costs_a_warning(broken, monkeypatch, tmp_path):
    def fails(profiler):
        profiler.undo.close()
        raise RuntimeError("no counters\nhere")

    monkeypatch.setattr(f"mmm.trainer.loop.profile.TorchProfiler.{broken}", fails)
    config = train(tmp_path, profile="torch", batch_size=2)
    assert len(load(tmp_path).loss) == 4
    assert config["options"]["profile"] == "torch"
    assert "profile" not in config
    what = {"start": "start", "stop": "end"}[broken]
    said = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "WARNING" in line]
    assert len(said) == 1
    assert said[0].endswith(f"--profile torch could not {what} on rank 0: no counters")


def test_pyinstrument(tmp_path):
    pytest.importorskip("pyinstrument")
    config = train(tmp_path, profile="pyinstrument", profile_steps="1:3", batch_size=2)
    assert config["profile"] == {
        "kind": "pyinstrument",
        "steps": [1, 3],
        "files": ["profile.html", "profile.txt"],
        "ranks": [0],
    }
    assert "train_step" in (tmp_path / "profile.txt").read_text()
    assert "<html" in (tmp_path / "profile.html").read_text()


def test_steps_that_the_run_has_not(tmp_path):
    train(tmp_path, profile="torch", profile_steps="7:9", batch_size=2)
    assert not (tmp_path / "trace.json.gz").exists()
    assert "--profile_steps 7:9: none of them is among the steps 0 to 3" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"profile_steps": "1:2"}, "--profile_steps without --profile"),
        ({"profile": "torch", "profile_steps": "2:1"}, "--profile_steps 2:1: give FROM:TO"),
        ({"profile": "torch", "profile_steps": "x"}, "--profile_steps x: give FROM:TO"),
        ({"profile": "torch", "profile_ranks": 0}, "--profile_ranks 0: it must be at least 1"),
        ({"profile": "pyinstrument", "profile_ranks": 2}, "rank 0 alone"),
    ],
)
def test_flags_that_are_wrong(flags, words):
    with pytest.raises(ConfigError, match=words):
        configure(lm.Config, **flags).check()


def test_a_package_that_is_missing_is_said_before_the_ranks_meet(monkeypatch):
    monkeypatch.setitem(profile.PACKAGES, "pyinstrument", "a_package_that_nobody_has")
    with pytest.raises(ConfigError, match=r"needs the package a_package_that_nobody_has, .* not installed"):
        lm.train(configure(lm.Config, profile="pyinstrument"))


AHEAD = 7_000_000_000  # ns


def offset(rank):
    def now():
        return time.time_ns() + AHEAD * rank.rank

    return tuple(clock_offset(rank, torch.device("cpu"), f"host {rank.rank}", now))


def test_the_offset_of_another_hosts_clock(run_on_ranks):
    found = run_on_ranks(offset, 3)
    assert found[0] == (0, 0)
    for rank in (1, 2):
        measured, error = found[rank]
        assert 0 < error < 50_000_000
        assert abs(measured + AHEAD * rank) <= error
