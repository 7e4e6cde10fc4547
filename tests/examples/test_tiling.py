"""The example of loss in chunks, MLP and weights in tiles: less memory, the same losses, and it says when they are
not."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import mmm.history
from mmm.examples import tiling
from mmm.trainer.config.command_line import configure

SMALL = {"seq_length": 256, "vocab_size": 4096, "ffn_dim": 512, "n_layers": 1, "dtype": "fp64", "plots": False}


@pytest.mark.long
def test_the_table_is_true(tmp_path):
    """Of 2 ranks, in processes of their own: weights in tiles need ranks to gather from."""
    flags = [f"--{name}={value}" for name, value in SMALL.items() if name != "plots"]
    launch = [Path(sys.executable).with_name("launch"), "-n", "2", "--device", "cpu", sys.executable, "-m"]
    line = [*map(str, launch), "mmm.examples.tiling", *flags, "--no-plots", "--outdir", str(tmp_path / "run")]
    out = subprocess.run(line, check=True, capture_output=True, text=True, timeout=300).stdout
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["losses_differ"] < 1e-9
    logits, hidden, matrix = 256 * 4096 * 8, 256 * 512 * 8, 64 * 512 * 8 * tiling.WIDER
    (full, chunks, tiles, both, weights) = about["peak_bytes"].values()
    assert chunks[0] < full[0] - logits
    assert tiles[0] < full[0] - 2 * hidden
    assert both[0] < 0.4 * full[0]
    assert weights[0] > 0.95 * full[0]  # of long sequences it saves little, and of a wide layer the others do
    assert min(chunks[1], tiles[1], both[1]) > 0.8 * full[1]
    assert weights[1] < full[1] - 3 * matrix  # a layer of three, gathered and then its gradient
    for way, peaks in about["peak_bytes"].items():
        (line,) = [line for line in out.splitlines() if line.startswith(way.ljust(18))]
        assert float(line[18:33]) == pytest.approx(peaks[0] / 1e6, abs=0.06)
    found = mmm.history.load(tmp_path / "run")
    assert found.way.values.tolist() == 2 * [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_loss_that_is_nan_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tiling, "train_way", lambda run, mesh, resolved, way, wide: (1, [1.0, math.nan if way == "both" else 1.0])
    )
    assert not tiling.train(configure(tiling.Config, **SMALL, outdir=tmp_path, overwrite=True))
