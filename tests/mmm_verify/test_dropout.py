"""What ranks drop: the same where they hold the same, something else where they hold something else."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmm_verify import verify


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def fields():
    """Samples of four positions."""
    return torch.randn(8, 4, 8), torch.randn(8, 4, 2)


def over_positions(model, mesh, seed=lambda rank: 7):
    torch.manual_seed(seed(mesh.get_rank()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(mesh.size())))


def seeded_apart(model, mesh):
    over_positions(model, mesh, lambda rank: rank)


def of_own_positions(model, batch, mesh):
    inputs, targets = batch
    if mesh is not None:
        rank = mesh.get_rank()
        inputs, targets = inputs.chunk(2, 1)[rank], targets.chunk(2, 1)[rank]
    return F.mse_loss(model(inputs), targets)


def tensor_parallel(model, mesh):
    parallelize_module(model.body, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(model, mesh):
    whole_outside = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
    )
    plan = {
        "body": whole_outside,
        "body.norm": SequenceParallel(),
        "body.up": ColwiseParallel(input_layouts=Shard(1)),
        "body.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "body.drop": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)


@pytest.mark.parametrize(
    ("mesh", "parallelize", "step", "advised"),
    [
        ("cp2", over_positions, of_own_positions, "drops"),
        ("cp2", seeded_apart, of_own_positions, ""),
        ("tp2", tensor_parallel, None, ""),
        ("tp2", sequence_parallel, None, "drops"),
    ],
)
def test_advice(mesh, parallelize, step, advised):
    verdict = verify(Block, parallelize, fields, step, mesh)
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert bool(verdict.advice) == bool(advised), verdict
    if advised:
        assert "body.drop drops the same places on ranks 0 and 1, which have different parts" in verdict.advice[0]
