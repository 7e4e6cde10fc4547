"""Each rank clips by a norm that has only the experts of its own in it.

Experts are plain tensors, so a function for the global norm does not know that other ranks have more of them. Ranks
clip the weights that they share by different factors, and these drift apart. Every rank prints a norm that looks
right. The right program adds up the experts' squares over the expert-parallel ranks.

NVIDIA-NeMo/Automodel#3816, and hpcaitech/ColossalAI#2192.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 3))
        self.mesh = None

    def forward(self, x):
        # (batch, 6) → (batch, 3)
        weights = self.router(x).softmax(-1)
        if self.mesh is not None:
            weights = own_part(copy(weights, self.mesh.get_group()), self.mesh, 1)
        output = torch.einsum("bi,eio,be->bo", x, self.experts, weights)
        if self.mesh is not None:
            output = reduce(output, self.mesh.get_group())
        return output


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 3)


def parallelize(model, mesh):
    model.mesh = mesh
    model.experts = nn.Parameter(own_part(model.experts.detach(), mesh, 0).clone())


def clip(model, batch, mesh, adds_up):
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    squares = model.experts.grad.square().sum()
    if mesh is not None and adds_up:
        dist.all_reduce(squares)
    for parameter in model.router.parameters():
        squares = squares + parameter.grad.square().sum()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, squares.sqrt())
    return loss.detach()


def right_step(model, batch, mesh):
    return clip(model, batch, mesh, adds_up=True)


def wrong_step(model, batch, mesh):
    # Wrong: other ranks have other experts, whose norm is missing.
    return clip(model, batch, mesh, adds_up=False)


BUG = KnownBug(
    title="each rank clips by a norm that has only its own experts in it",
    reports=("NVIDIA-NeMo/Automodel#3816", "hpcaitech/ColossalAI#2192"),
    model=Mixture,
    batch=make_batch,
    mesh="ep2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="the norm that the step clips by",
    says="rank 0 counted only its own parts",
)
