"""The example that counts every layout: its table, its exit code, and what it refuses. The example of loss in chunks,
MLP and weights in tiles: the gradients of the plain model, less memory, the same losses, and it says when they are
not."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import mmm.history
from mmm.errors import UserError
from mmm.examples import tiling, traffic
from mmm.examples.traffic import Sent, max_rel_diff, table
from mmm.layout import Layout
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.parallel import cross_entropy, draw_weights
from mmm.run.command_line import configure
from mmm.torch_private.faults import PIECES
from support.clock import PATIENCE
from support.faults import skipped_by

LAUNCH = str(Path(sys.executable).parent / "launch")


@pytest.mark.long
def test_every_layout_on_four_ranks(tmp_path):
    command = [LAUNCH, "-n", "4", "--device", "cpu", "python3", "-m", "mmm.examples.traffic", "--outdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counted and formula differ by 0." in done.stdout
    traffic = json.loads((tmp_path / "config.json").read_text())["traffic"]
    assert len(traffic) == 13
    for name, by_rank in traffic.items():
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


def test_one_rank_is_refused_before_anything_is_written(monkeypatch):
    """It sends nothing, so that a table of what it sends would be empty."""
    monkeypatch.setattr("mmm.history.prepare", lambda *_, **__: pytest.fail("the run's folder was made"))
    with pytest.raises(UserError, match="1 rank: there is nobody to send to"):
        traffic.train(configure(traffic.Config))


SMALL = {"seq_length": 256, "vocab_size": 4096, "ffn_dim": 512, "n_layers": 1, "dtype": "fp64", "plots": False}
SIZES = TransformerConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=48, vocab_size=40)
CPU = torch.device("cpu")


def plain():
    with torch.device("meta"):
        model = Transformer(SIZES).to(torch.float64)
    draw_weights(model, CPU, 3)
    return model


def batch(ranks):
    generator = torch.Generator().manual_seed(0)
    # Inputs, targets.
    return torch.randint(0, SIZES.vocab_size, (2, 2 * ranks, 12), generator=generator)


def whole_name(name):
    """`body.layers.0.feed_forward.w1.tiles.2.weight` → `layers.0.feed_forward.w1.weight`."""
    return re.sub(r"\.tiles\.\d+", "", name.removeprefix("body."))


def loss_and_gradients(rank, ranks, pieces):
    model = tiling.LanguageModel(plain(), **pieces)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    tiling.shard(model, mesh, MixedPrecisionPolicy())
    inputs, targets = (full.chunk(ranks)[rank.rank] for full in batch(ranks))
    loss = model(inputs, targets, targets.numel() * ranks)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():  # the tiles of a matrix in their order
        gradients.setdefault(whole_name(name), []).append(parameter.grad.full_tensor())
    return float(loss), {name: torch.cat(tiles) for name, tiles in gradients.items()}


@pytest.mark.parametrize(
    "pieces",
    [
        {"loss_chunks": 5},
        {"tile": 5},
        {"tile_weights": 5},
        # 7 divides neither rows nor ranks.
        pytest.param({"loss_chunks": 3, "tile": 4, "tile_weights": 7}, marks=skipped_by(PIECES)),
    ],
    ids=str,
)
def test_same_loss_and_gradients_as_the_plain_model(run_on_ranks, pieces):
    ranks = 2
    inputs, targets = batch(ranks)
    model = plain()
    loss = cross_entropy(model(inputs), targets, targets.numel())
    loss.backward()
    results = run_on_ranks(loss_and_gradients, ranks, ranks, pieces)
    assert sum(local for local, _ in results) == pytest.approx(float(loss), rel=1e-12)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _, gradients in results:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


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
    # Of long sequences it saves little, and of a wide layer the others do.
    assert weights[0] > 0.95 * full[0]
    assert min(chunks[1], tiles[1], both[1]) > 0.8 * full[1]
    # A layer of three, gathered and then its gradient.
    assert weights[1] < full[1] - 3 * matrix
    for way, peaks in about["peak_bytes"].items():
        (line,) = [line for line in out.splitlines() if line.startswith(way.ljust(18))]
        assert float(line[18:33]) == pytest.approx(peaks[0] / 1e6, abs=0.06)
    history = mmm.history.load(tmp_path / "run")
    assert history.way.values.tolist() == 2 * [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_loss_that_is_nan_is_another(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tiling, "train_way", lambda run, mesh, resolved, way, wide: (1, [1.0, math.nan if way == "both" else 1.0])
    )
    assert not tiling.train(configure(tiling.Config, **SMALL, outdir=tmp_path, overwrite=True))
