"""Gradients of experts are N times too large with N expert-parallel ranks.

The ranks have different samples, and each rank's experts work on the tokens of all of them. So an expert's gradient is
the sum over all ranks, while every other gradient is the mean. It has to be divided by their number; nobody does, and
the loss falls just the same. The right program divides.

pytorch/pytorch#160285: gradients were doubled with two expert-parallel ranks.
"""

import torch
from torch import nn

from support.by_hand import average, gather_summed
from support.known_bugs import KnownBug, Program, own_part


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 3))
        self.mesh = None

    def forward(self, x):
        # (batch, 6) → (batch, 3)
        scores = self.router(x).softmax(-1)
        if self.mesh is None:
            return torch.einsum("bi,eio,be->bo", x, self.experts, scores)
        # Tokens of all ranks, and their scores for this rank's experts: (all batches, 6), (all batches, own experts)
        group = self.mesh.get_group()
        tokens = gather_summed(x, group)
        own_scores = own_part(gather_summed(scores, group), self.mesh, 1)
        summands = torch.einsum("bi,eio,be->bo", tokens, self.experts, own_scores)
        # (ranks, all batches, 3) → the sum over ranks for this rank's tokens
        return own_part(gather_summed(summands[None], group), self.mesh, 1).sum(0)


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 3)


def own_experts(model, mesh):
    model.mesh = mesh
    model.experts = nn.Parameter(own_part(model.experts.detach(), mesh, 0).clone())
    average(model.router, mesh.get_group())


def divided(model, mesh):
    own_experts(model, mesh)
    model.experts.register_hook(lambda gradient: gradient / mesh.size())


BUG = KnownBug(
    title="experts' gradients are too large by the number of ranks",
    reports=("pytorch/pytorch#160285",),
    model=Mixture,
    batch=make_batch,
    mesh="dp2",
    right=Program(divided),
    wrong=Program(own_experts),
    first="gradient of experts",
    says=r"experts on rank 0: 2 times \(the size of dp\) what it should be",
)
