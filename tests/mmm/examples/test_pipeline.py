"""The pipeline as a user runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray

import mmm.history
from mmm.errors import ConfigError
from mmm.examples import fsdp_tp, pipeline
from mmm.run.command_line import configure
from support.clock import PATIENCE
from support.programs import run_program

LAUNCH = str(Path(sys.executable).parent / "launch")
TINY = {
    "preset": "debug",
    "n_layers": 4,
    "seq_length": 16,
    "global_batch_size": 8,
    "eval_batches": 1,
    "eval_every": 3,
    "max_iters": 5,
    "dtype": "fp64",
}
FLAGS = [text for name, value in TINY.items() for text in (f"--{name}", str(value))]


def launch(ranks, outdir, *flags):
    command = [LAUNCH, "-n", str(ranks), "--device", "cpu", "python3", "-m", "mmm.examples.pipeline"]
    for name, value in TINY.items():
        if f"--{name}" not in flags:
            command += [f"--{name}", str(value)]
    return subprocess.run([*command, "--outdir", str(outdir), *flags], capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The losses of the main example on one device."""
    outdir = tmp_path_factory.mktemp("one") / "out"
    fsdp_tp.train(configure(fsdp_tp.Config, **TINY, plots=False, outdir=outdir))
    return mmm.history.load(outdir)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, ("--schedule", "ZBVZeroBubble")), (4, ("--tp", "2", "--microbatches", "4"))],
    ids=["pp2 ZBV", "pp2 tp2 1F1B"],
)
def test_same_losses_as_on_one_device(run_on_ranks, one_device, tmp_path, ranks, flags):
    arguments = [*FLAGS, "--no-plots", "--outdir", tmp_path / "out"]
    done = run_program(run_on_ranks, ranks, "mmm.examples.pipeline", *arguments, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" - iter=") == 5
    assert "stage 0, " in done.stdout
    data = xarray.open_dataset(tmp_path / "out" / "train_dataset.h5", engine="h5netcdf")
    np.testing.assert_allclose(data.loss, one_device.loss, rtol=1e-9)
    np.testing.assert_allclose(data.val_loss, one_device.val_loss, rtol=1e-9)
    parts = data.dtd + data.dtf + data.dtb + data.dtw + data.dto
    np.testing.assert_allclose(parts, data.dt, rtol=1e-12)
    assert (data.dtw > 0).all()
    assert (data.dtf > 0).all()
    assert (data.dtb > 0).all()
    stages = json.loads((tmp_path / "out" / "config.json").read_text())["stages"]
    assert " ".join(name for stage in stages for name in stage) == (
        "tok_embeddings layers.0 layers.1 layers.2 layers.3 norm output"
    )
    assert len(stages) == (4 if "ZBVZeroBubble" in flags else 2)


@pytest.mark.long
def test_timeline(tmp_path):
    done = launch(2, tmp_path / "out", "--schedule", "ZBVZeroBubble", "--timeline", "--max_iters", "3")
    assert done.returncode == 0, done.stderr
    assert "ZBVZeroBubble, 8 micro-batches: F" in done.stdout
    assert re.search(r"\nrank 1   ··F0\S+   waited \d", done.stdout)
    bubble = json.loads((tmp_path / "out" / "config.json").read_text())["bubble"]
    assert [bubble["formula"], bubble["chart"]] == [pytest.approx(1 / 49)] * 2
    assert 0 < bubble["measured"] < 1


def test_timeline_of_one_step_is_refused(monkeypatch, tmp_path):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--timeline with 1"):
        pipeline.train(configure(pipeline.Config, **{**TINY, "max_iters": 1}, timeline=True))
    assert list(tmp_path.iterdir()) == []
