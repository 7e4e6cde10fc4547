"""Modules that every rank of tp has: those whose gradients are partial sums are added up, or refused by name."""

import pytest
import torch

from mmm.parallel import Layout, apply, build_mesh, materialize
from mmm.runtime.device import Precision
from mmm_lab.parity.fixtures.head_norm import HeadNorm, make_batch
from mmm_lab.parity.plans import head_norm_plan

CPU = torch.device("cpu")
PRECISIONS = {
    "fp64": Precision("fp64", torch.float64, torch.float64),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
}


def gradients(rank, layout, fields):
    """After two micro-batches: how far each gradient is off from one device's."""
    torch.manual_seed(0)
    model = HeadNorm()
    plain = HeadNorm().double()
    plain.load_state_dict(model.state_dict())
    x, _ = make_batch(8, torch.Generator().manual_seed(1))
    plain(x).square().sum().backward()
    model = apply(model, build_mesh(layout, "cpu"), head_norm_plan(), PRECISIONS["fp64"], **fields)
    materialize(model, CPU, 0)
    own = 8 // layout.dp
    for part in x[layout.dp_coordinate(rank.rank) * own :][:own].chunk(2):
        model(part).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert model.blocks[0].q_norm.weight.grad.full_tensor().shape == (4,)
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
        assert len(off) == 23
        assert max(off.values()) < 1e-14, off
