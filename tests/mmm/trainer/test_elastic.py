"""Trainers under `launch --elastic`: on fewer ranks, and on all again, the curve is the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmm.errors import ConfigError
from mmm.run.command_line import configure
from mmm.trainer.lm import Config, train
from mmm_launch.contract import ELASTIC_VARIABLE
from support.clock import PATIENCE

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "elastic.py"


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        ({}, "--checkpoint_every and --outdir and --global_batch_size"),
        ({"checkpoint_every": 5, "global_batch_size": 8}, "--outdir"),
    ],
)
def test_what_it_needs(monkeypatch, argv, missing):
    monkeypatch.setenv(ELASTIC_VARIABLE, "1:4")
    config = configure(Config, **argv)
    with pytest.raises(ConfigError) as error:
        train(config)
    expected = f"launch --elastic: to resume with another number of ranks lm needs {missing} as well"
    assert str(error.value) == expected


@pytest.mark.long
def test_random_kills(tmp_path):
    """A few of what `benchmarks/elastic.py` does by the hundred: the second kill waits until all are in again."""
    command = [sys.executable, BENCHMARK, "--kills", "2", "--steps", "80", "--ranks", "3", "4"]
    done = subprocess.run(
        [*map(str, command), "--json", tmp_path / "found.json"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["wrong"], report["kills"]) == ([], 2)
    assert report["largest_difference"] < 1e-9
    assert min(report["sizes"]) < 4
