"""A parameter is in no FSDP unit, so nothing reduces its gradient.

Modules that a wrapping policy does not know, or parameters that it is told to ignore, stay plain tensors on each rank.
Each rank updates its own copy from its own samples. A checkpoint saves the copy of rank 0, and all else looks right.
The right program has every parameter in a unit.

areal-project/AReaL#313: gradients of parameters outside of FSDP differ between ranks.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from support.known_bugs import KnownBug, Program


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        # (batch, 4), in and out
        return self.head(torch.tanh(self.body(x)) * self.scale)


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 4)


def all_of_it(model, mesh):
    fully_shard(model, mesh=mesh)


def without_the_scale(model, mesh):
    # Wrong: nobody averages this gradient over the ranks.
    fully_shard(model, mesh=mesh, ignored_params={model.scale})


BUG = KnownBug(
    title="a parameter is in no FSDP unit",
    reports=("areal-project/AReaL#313",),
    model=Scaled,
    batch=make_batch,
    mesh="dp2",
    right=Program(all_of_it),
    wrong=Program(without_the_scale),
    first="gradient of scale",
    says="scale on rank 0: each dp rank kept its own value.*missing all-reduce over dp",
)
