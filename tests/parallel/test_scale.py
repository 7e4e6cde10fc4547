"""What a rank pays for the number of ranks: nothing in a step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmm.layout import Layout
from mmm.models.meta import meta_parameters
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel.mesh import build_mesh
from mmm.parallel.parallelize import apply
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from mmm.trainer.run.rows import sums_in_order

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "scale.py"
FEW, MANY = 1024, 8192


@pytest.fixture
def of_many():
    """This process as rank 0 of FEW, on the group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FEW)
    yield
    dist.destroy_process_group()


@pytest.mark.long
def test_a_steps_python_memory_does_not_grow_with_the_ranks(tmp_path):
    rows = tmp_path / "rows.json"
    words = [sys.executable, BENCHMARK, "--ranks", str(FEW), str(MANY), "--layout", "hsdp·tp8", "--json", rows]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    few, many = json.loads(rows.read_text())
    for kind in ("step", "step with row"):
        assert many[f"{kind} bytes"] < 1.05 * few[f"{kind} bytes"]
    kind, table = "step with row on rank 0 bytes", 11 * 8 * MANY  # of 11 numbers a rank: losses and seconds
    assert many[kind] < 1.05 * few[kind] + table


def test_meshes_are_made_once(of_many):
    """Each has a list of all ranks."""
    layout = Layout(dp_replicate=FEW // 16, dp_shard=4, tp=4).fit(FEW)
    mesh = build_mesh(layout, "cpu")
    assert mesh["tp"] is mesh["tp"]
    with meta_parameters():
        model = Transformer(TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=64))
    find = torch.distributed.device_mesh.DeviceMesh.__getitem__
    apply(model, mesh, transformer_plan(), Precision("fp32", torch.float32, torch.float32))
    meshes = {id(parameter.device_mesh): parameter.device_mesh for parameter in model.parameters()}
    assert len(meshes) == len({each.mesh_dim_names for each in meshes.values()})
    assert torch.distributed.device_mesh.DeviceMesh.__getitem__ is find


def test_the_sum_of_losses_is_the_same_to_the_last_bit():
    """Rank after rank, as one would add them by hand."""

    table = torch.randn(1000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    expected = [0.0]
    for row in table.tolist():
        expected = [total + value for total, value in zip(expected, row, strict=True)]
    assert sums_in_order(table) == expected
