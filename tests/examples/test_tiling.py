"""The example of loss in chunks and MLP in tiles: less memory, the same losses, and it says when they are not."""

import json
import math

import pytest

import mmm.history
from mmm.examples import tiling
from mmm.trainer.config.command_line import configure

SMALL = {"seq_length": 256, "vocab_size": 4096, "ffn_dim": 512, "n_layers": 1, "dtype": "fp64", "plots": False}


@pytest.mark.long
def test_the_table_is_true(tmp_path, monkeypatch, capsys):
    config = configure(tiling.Config, **SMALL, outdir=tmp_path, overwrite=True)
    assert tiling.train(config)
    about = json.loads((tmp_path / "config.json").read_text())
    peaks = list(about["peak_bytes"].values())
    assert about["losses_differ"] < 1e-9
    logits, hidden = 256 * 4096 * 8, 256 * 512 * 8
    assert peaks[1] < peaks[0] - logits
    assert peaks[2] < peaks[0] - 2 * hidden
    assert peaks[3] < 0.4 * peaks[0]
    lines = capsys.readouterr().out.splitlines()
    for way, peak in zip(tiling.WAYS, peaks, strict=True):
        (line,) = [line for line in lines if line.startswith(way.ljust(16))]
        assert float(line[16:26]) == pytest.approx(peak / 1e6, abs=0.06)
    assert mmm.history.load(tmp_path).way.values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    monkeypatch.setattr(tiling, "TOLERANCE", {"fp64": -1.0})
    monkeypatch.setattr(tiling, "train_way", lambda *_: (1, [1.0, 1.0]))
    assert not tiling.train(config)


def test_a_loss_that_is_nan_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(tiling, "train_way", lambda run, mesh, resolved, way: (1, [1.0, math.nan if way == 2 else 1.0]))
    assert not tiling.train(configure(tiling.Config, **SMALL, outdir=tmp_path, overwrite=True))
