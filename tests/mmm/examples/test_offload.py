"""The example of offload: weights as without it, the optimizer's state in a file, and a table that is true."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from mmm.examples import offload
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.parallel import cross_entropy, draw_weights

SIZES = TransformerConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=48, vocab_size=40)
STEPS = 3


def plain():
    with torch.device("meta"):
        model = Transformer(SIZES).to(torch.float64)
    draw_weights(model, torch.device("cpu"), 3)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    # Inputs, targets.
    return torch.randint(0, SIZES.vocab_size, (2, 4, 12), generator=generator)


def in_files_of(folder, address):
    """Whether an address of this process is that of a mapped file of the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


def train(rank, ranks, way, folder):
    """The weights after a few steps, and for each moment whether it lies in a file of the folder."""
    model = plain()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    offload.shard(model, mesh, way, MixedPrecisionPolicy())
    optimizer = offload.make_optimizer(model, way, folder, lr=0.01)
    for step in range(STEPS):
        inputs, targets = (full.chunk(ranks)[rank.rank] for full in batch(step))
        cross_entropy(model(inputs), targets, 4 * 12).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    mapped = {in_files_of(folder, moment.data_ptr()) for moment in moments if moment.numel()}
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}, mapped


@pytest.mark.parametrize("way", offload.WAYS)
def test_weights_as_without_offload(run_on_ranks, tmp_path, way):
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = batch(step)
        cross_entropy(model(inputs), targets, targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    for weights, mapped in run_on_ranks(train, 2, 2, way, tmp_path):
        assert mapped == {way == "disk"}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-9, atol=1e-12, msg=name)
    # The file has no name, and ends with its process.
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_before_the_first_step(monkeypatch, tmp_path):
    """And does not end the process by a signal in the middle of a step."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        offload.StateOnDisk(tmp_path, [])


@pytest.mark.long
def test_the_table_is_true(tmp_path):
    launch = [Path(sys.executable).with_name("launch"), "-n", "2", "--device", "cpu", sys.executable, "-m"]
    flags = ["--n_layers=1", "--dtype=fp64", "--folder", tmp_path, "--outdir", tmp_path / "run"]
    line = [str(word) for word in (*launch, "mmm.examples.offload", *flags)]
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=300)
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["losses_differ"] < 1e-9
    places = about["bytes_by_place"]
    assert places["device"]["host"] == places["host"]["device"] == places["disk"]["device"] == 0
    assert places["device"]["device"] == places["host"]["host"]
    assert places["disk"]["host"] == places["disk"]["disk"] == places["host"]["host"] / 2
