"""The norm of the gradients has only the first rank's part of a sharded parameter.

A parameter that is sharded over heads was not marked as sharded. So the function for the norm takes it for a copy, and
counts it on the first tensor-parallel rank only. The norm is a little too small, the same on all ranks, and clipping
cuts too little. The right program counts every rank's part.

NVIDIA/Megatron-LM#7452, finding 8 (attention sinks), and NVIDIA/Megatron-LM#5916 (experts).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, gather
from support.known_bugs import KnownBug, Program, own_part


class Sinks(nn.Module):
    """Each of four heads weighs its values by a softmax that has a learned sink in it."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(6, 4, bias=False)
        self.sink = nn.Parameter(torch.full((4,), 2.0))
        self.mesh = None

    def forward(self, x):
        # (batch, positions, 6) → (batch, heads)
        if self.mesh is not None:
            x = copy(x, self.mesh.get_group())
        scores = self.score(x)
        weights = scores.exp() / (scores.exp().sum(1, keepdim=True) + self.sink.exp())
        output = (weights * scores).sum(1)
        return output if self.mesh is None else gather(output, self.mesh.get_group())


def make_batch():
    return torch.randn(8, 5, 6), torch.randn(8, 4)


def parallelize(model, mesh):
    model.mesh = mesh
    model.score.weight = nn.Parameter(own_part(model.score.weight.detach(), mesh, 0).clone())
    model.sink = nn.Parameter(own_part(model.sink.detach(), mesh, 0).clone())


def clip(model, batch, mesh, sink_is_sharded):
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    squares = model.score.weight.grad.square().sum()
    of_the_sink = model.sink.grad.square().sum()
    if mesh is None or sink_is_sharded or mesh.get_local_rank() == 0:
        squares = squares + of_the_sink
    if mesh is not None:
        dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, squares.sqrt())
    return loss.detach()


def right_step(model, batch, mesh):
    return clip(model, batch, mesh, sink_is_sharded=True)


def wrong_step(model, batch, mesh):
    # Wrong: other ranks have other parts of it.
    return clip(model, batch, mesh, sink_is_sharded=False)


BUG = KnownBug(
    title="the norm has only the first rank's part of a sharded parameter",
    reports=("NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#5916"),
    model=Sinks,
    batch=make_batch,
    mesh="tp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="the norm that the step clips by",
    says="counted only rank 0's part of sink",
)
