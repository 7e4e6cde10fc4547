"""An evaluation between two steps changes no bit of an exact run, also in a pipeline."""

from __future__ import annotations

import pytest
import torch

from mmm.data import RandomTokens
from mmm.layout import Layout, Techniques
from mmm.models.llama.definition import MODEL
from mmm.models.llama.model import TransformerConfig
from mmm.parallel import build_mesh, partition_model
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.device import choose_precision

CPU = torch.device("cpu")
SIZES = TransformerConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=16, vocab_size=32)
LAYOUTS = [Layout(pp=2, dp_shard=1), Layout(dp_shard=2)]


def norms(rank, layout, evaluates):
    techniques = Techniques(exact=8)
    local_batch = 8 // layout.dp
    model, sample = MODEL.on_meta(SIZES, local_batch, 8)
    plan = MODEL.plan(SIZES)
    partition = partition_model(model, plan, layout, techniques, sample, "fp32")
    mesh = build_mesh(layout, "cpu")
    precision = choose_precision("fp32", CPU)
    parallel = ParallelModel(model, plan, mesh, precision, techniques, partition, device=CPU, seed=0)
    values = []
    for step in range(2):
        batch = RandomTokens(32, 8, 0).batch(step, 8, layout.dp_coordinate(rank.rank) * local_batch, local_batch)
        parallel.forward_backward(batch)
        values.append(parallel.clip(1.0).item())
        for parameter in parallel.parameters():
            parameter.grad = None
        if evaluates:
            parallel.evaluate(batch)
    return values


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_evaluation_between_two_steps(run_on_ranks, layout):
    plain = run_on_ranks(norms, 2, layout, False)
    assert run_on_ranks(norms, 2, layout, True) == plain
    assert plain[0] == plain[1]
    assert min(plain[0]) > 0
