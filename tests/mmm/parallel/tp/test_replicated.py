"""Modules that every rank of tp has: those whose gradients are partial sums are added up, or refused by name."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.parallel import Layout, PartialGradient, Plan, Replicated, apply, build_mesh, materialize
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


class Shared(nn.Module):
    """A parameter of its own, which all heads share, beside matrices that are sharded."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return self.down((self.up(self.norm(x)).unflatten(-1, (-1, 4)) * self.scale).flatten(-2))


def of_its_own(rank):
    torch.manual_seed(0)
    model = nn.Sequential(Shared())
    plain = nn.Sequential(Shared()).double()
    plain.load_state_dict(model.state_dict())
    inside = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel(), "0.norm": Replicated()}
    plan = Plan({"0": PartialGradient(), **inside}, fsdp_units=("0",))
    model = apply(model, build_mesh(Layout(dp_shard=1, tp=2), "cpu"), plan, PRECISIONS["fp64"])
    materialize(model, CPU, 0)
    x = torch.randn(3, 8, dtype=torch.float64)
    for net in (plain, model):
        net(x).square().sum().backward()
    return [
        ((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()).item()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_a_parameter_beside_modules_of_other_styles(run_on_ranks):
    for off in run_on_ranks(of_its_own, 2):
        assert max(off) < 1e-14, off
