"""The example that counts every layout: its table, its exit code, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmm.errors import UserError
from mmm.examples import traffic
from mmm.examples.traffic import Sent, max_rel_diff, table
from mmm.layout import Layout
from mmm.run.command_line import configure
from support.clock import PATIENCE

LAUNCH = str(Path(sys.executable).parent / "launch")


@pytest.mark.long
def test_every_layout_on_four_ranks(tmp_path):
    command = [LAUNCH, "-n", "4", "--device", "cpu", "python3", "-m", "mmm.examples.traffic", "--outdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counted and formula differ by 0." in done.stdout
    found = json.loads((tmp_path / "config.json").read_text())["traffic"]
    assert len(found) == 13
    for name, by_rank in found.items():
        assert len(by_rank) == 4
        for step in by_rank:
            assert step["counted"].keys() >= step["formula"].keys(), name
            for axis, formula in step["formula"].items():
                assert step["counted"][axis] == pytest.approx(formula, rel=0.005), (name, axis)


def test_table_and_verdict():
    good = Sent({"tp": 1040, "dp_shard": 500}, {"tp": 1000.0, "dp_shard": 500.0})
    assert max_rel_diff(good) == pytest.approx(0.04)
    assert max_rel_diff(good._replace(counted={"tp": 1000, "dp_shard": 500, "cp": 8})) == float("inf")
    assert max_rel_diff(good._replace(counted={"tp": 1000})) == 1.0
    layouts = {"tp": Layout(dp_shard=2, tp=2)}
    lines = [line.split() for line in table(layouts, {"tp": [good._replace(counted={"tp": 1}), good]}).splitlines()]
    assert lines[1] == ["tp", "dp2·tp2", "tp", "1,040", "1,000", "4.00%"]
    assert lines[2] == ["tp", "dp2·tp2", "dp_shard", "500", "500", "0.00%"]


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        ({}, 1, "1 rank: there is nobody to send to"),
        ({"global_batch_size": 6}, 4, "does not divide over 4"),
        ({"global_batch_size": 10**6}, 4, "fewer than one global batch of 1000000"),
    ],
)
def test_refused_before_any_process_group(monkeypatch, options, ranks, words, no_process_group):
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("mmm.history.prepare", lambda *_, **__: pytest.fail("the run's folder was made"))
    with pytest.raises(UserError, match=words):
        traffic.train(configure(traffic.Config, **options))
