"""Modules that every rank of tp has: those whose gradients are partial sums are added up, or refused by name."""

import pytest
import torch

from mmm.models.qwen3.definition import MODEL, SMALL
from mmm.nn import weights
from mmm.parallel import Layout, build_mesh, materialize, parallelize
from mmm.runtime.device import Precision

CPU = torch.device("cpu")
PRECISIONS = {
    "fp64": Precision("fp64", torch.float64, torch.float64),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
}


def gradients(rank, layout, fields):
    """After two micro-batches: how far each gradient is off from one device's."""
    plain = MODEL.build(SMALL).double()
    weights.initialize(plain, 0)
    x = torch.randint(SMALL.vocab_size, (8, 32), generator=torch.Generator().manual_seed(1))
    plain(x).square().sum().backward()
    model = parallelize(MODEL.build(SMALL), build_mesh(layout, "cpu"), MODEL.plan(SMALL), PRECISIONS["fp64"], **fields)
    materialize(model, CPU, 0)
    own = 8 // layout.dp
    for micro_batch in x[layout.dp_coordinate(rank.rank) * own :][:own].chunk(2):
        model(micro_batch).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert model.layers["0"].attention.q_norm.weight.grad.full_tensor().shape == (16,)
    return {
        name: ((p.grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name, p in ((name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters())
    }


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (Layout(dp_shard=1, tp=2), {}),
        pytest.param(Layout(dp_shard=2, tp=2), {"checkpointing": "full"}, marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2, tp=2), {"reshard_after_forward": "always"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_partial_gradients_are_added_up(run_on_ranks, layout, fields):
    for off in run_on_ranks(gradients, layout.ranks, layout, fields):
        assert len(off) == 68
        assert max(off.values()) < 1e-14, off
