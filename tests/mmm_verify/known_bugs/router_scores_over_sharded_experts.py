"""Experts are sharded over tp, and the router's scores get only a part of their gradient.

Each tensor-parallel rank has a slice of every expert, so its output is a summand. Scores that are multiplied with it
have a summand as their gradient, and the router behind them too. The loss is right; the ranks' routers drift apart
from the first step on. The right program adds up the gradient where the scores enter the sharded part.

pytorch/torchtitan#2387, mended in pytorch/torchtitan#2416.
"""

import torch
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.up = nn.Parameter(torch.randn(3, 6, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 6))
        self.group = None
        self.copies_scores = True

    def forward(self, x):
        # (batch, 6), in and out
        scores = self.router(x).softmax(-1)
        if self.group is not None:
            x = copy(x, self.group)
            if self.copies_scores:
                scores = copy(scores, self.group)
        hidden = torch.einsum("bi,eih->beh", x, self.up).tanh()
        output = torch.einsum("beh,eho,be->bo", hidden, self.down, scores)
        return output if self.group is None else reduce(output, self.group)


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 6)


def shard_experts(model, mesh):
    model.group = mesh.get_group()
    model.up = nn.Parameter(own_part(model.up.detach(), mesh, 2).clone())
    model.down = nn.Parameter(own_part(model.down.detach(), mesh, 1).clone())


def forgets_the_scores(model, mesh):
    shard_experts(model, mesh)
    # Wrong: each rank's slice of the experts gives only a part of the scores' gradient.
    model.copies_scores = False


BUG = KnownBug(
    title="the gradient of a router's scores is not added up over sharded experts",
    reports=("pytorch/torchtitan#2387", "pytorch/torchtitan#2416"),
    model=Mixture,
    batch=make_batch,
    mesh="tp2",
    right=Program(shard_experts),
    wrong=Program(forgets_the_scores),
    first="gradient of router.weight",
    says="router.weight on rank 0: partial over tp",
)
