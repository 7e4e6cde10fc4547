"""A rank takes its part of a sequence by its place in another group than the one that joins the parts.

A function that has no group as argument falls back to the global one, which orders ranks in another way than the
model's mesh. Shapes fit, and ranks of a group take the same part twice, another never. The right program passes the
model's group everywhere.

NVIDIA/Megatron-LM#7452, finding 7: embeddings scattered without the model's tp group.
"""

import torch
import torch.distributed as dist
from torch import nn

from support.by_hand import average, gather
from support.known_bugs import KnownBug, Program


class Block(nn.Module):
    """Works on each position by itself, so each rank of tp can take some."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.group, self.place = None, None

    def forward(self, x):
        # (batch, positions, 6), in and out
        if self.group is None:
            return self.linear(x)
        own = x.chunk(dist.get_world_size(self.group), 1)[self.place]
        # `gather` joins along the last dim.
        return gather(self.linear(own).transpose(1, 2), self.group).transpose(1, 2)


def make_model():
    return nn.Sequential(Block(), nn.Tanh(), nn.Linear(6, 3))


def make_batch():
    return torch.randn(4, 6, 6), torch.randn(4, 6, 3)


def shard_positions(model, mesh, place):
    model[0].group, model[0].place = mesh["tp"].get_group(), place
    for parameter in model[0].parameters():
        parameter.register_hook(lambda gradient: sum_over(gradient, mesh["tp"].get_group()))
    average(model, mesh["dp"].get_group())


def sum_over(gradient, group):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def by_the_mesh(model, mesh):
    shard_positions(model, mesh, mesh["tp"].get_local_rank())


def by_the_global_rank(model, mesh):
    # Right only where tp is the innermost axis.
    shard_positions(model, mesh, mesh.get_rank() % mesh["tp"].size())


BUG = KnownBug(
    title="a rank takes its part of a sequence by its rank in another group",
    reports=("NVIDIA/Megatron-LM#7452",),
    model=make_model,
    batch=make_batch,
    mesh="tp2,dp2",
    right=Program(by_the_mesh),
    wrong=Program(by_the_global_rank),
    first="output of 0 on rank",
    says="the loss",
)
