"""A run's record has what was predicted for it and what was measured, and nothing that goes wrong there ends a run."""

import json
import subprocess
import sys

import pytest

from mmm_lab.planner.measured import measured_path
from mmm_launch.machines.find import BUILT_IN

LM = [sys.executable, "-m", "mmm.trainer.lm", "--device", "cpu", "--preset", "debug", "--dataset", "random"]
LM += ["--seq_length", "32", "--batch_size", "2", "--max_iters", "3", "--no-plots", "--eval_batches", "1"]


def run(tmp_path, monkeypatch, machine=None):
    """The record of a run, and its last line. machine: what is in the machine file of this host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if machine is not None:
        measured_path().parent.mkdir(parents=True)
        measured_path().write_text(machine)
    done = subprocess.run([*LM, "--outdir", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    (line,) = [line for line in lines if "memory of rank 0: " in line or "no prediction: " in line]
    return json.loads((tmp_path / "run" / "config.json").read_text()), line


@pytest.mark.parametrize("known", [pytest.param(False, marks=pytest.mark.long), True])
def test_predicted_and_measured(tmp_path, monkeypatch, known):
    laptop = (BUILT_IN / "laptop.json").read_text()
    config, line = run(tmp_path, monkeypatch, laptop if known else None)
    predicted, measured = config["predicted"], config["measured"]
    assert predicted["peak_bytes"] == sum(predicted["memory_bytes"].values()) > 0
    assert measured["step_seconds"] > 0
    assert measured["peak_bytes"] > 0
    assert f"predicted {predicted['peak_bytes'] / 2**20:,.2f} MiB; step: " in line
    if known:
        assert predicted["machine"] == "Laptop"
        assert f"step: predicted {predicted['step_seconds']:.4g} s (Laptop), measured" in line
    else:
        assert predicted["step_seconds"] is None
        assert "mmm machine --measure" in line


@pytest.mark.long
def test_a_prediction_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    config, line = run(tmp_path, monkeypatch, "{no machine")
    assert config["predicted"]["failed"].startswith("MachineError: machine file ")
    assert "no prediction: MachineError" in line
    assert config["measured"]["step_seconds"] > 0
