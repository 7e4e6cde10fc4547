"""Where a parameter has nobody to be reduced with, each micro-batch doubles what is accumulated.

Gradients are accumulated in a buffer, and reduced into it. For a group of one rank the reduction has nothing to do, but
its result, which is the buffer itself, is added to the buffer all the same. After N micro-batches the first weighs 2^N.
Only parameters with groups of one are wrong, such as experts when all ranks have different ones. The right program
adds only what is new.

NVIDIA/Megatron-LM#6660: gradients doubled in every micro-batch.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import gather_summed
from support.known_bugs import KnownBug, Program, own_part

MICROBATCHES = 2


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


def accumulate(model, batch, mesh, doubles):
    ranks = 1 if mesh is None else mesh.size()
    total = 0.0
    for inputs, targets in zip(batch[0].chunk(MICROBATCHES), batch[1].chunk(MICROBATCHES), strict=True):
        # The mean over the samples of all ranks: gradients are added up.
        loss = F.mse_loss(model(inputs), targets) / MICROBATCHES / ranks
        loss.backward()
        total += loss.detach() * ranks
        if doubles and mesh is not None:
            model.experts.grad += model.experts.grad
    if mesh is not None:
        for parameter in model.router.parameters():
            dist.all_reduce(parameter.grad)
    return total


def right_step(model, batch, mesh):
    return accumulate(model, batch, mesh, doubles=False)


def wrong_step(model, batch, mesh):
    # Wrong: an all-reduce over one rank adds what is there to itself.
    return accumulate(model, batch, mesh, doubles=True)


BUG = KnownBug(
    title="each micro-batch doubles what a group of one rank has accumulated",
    reports=("NVIDIA/Megatron-LM#6660",),
    model=Mixture,
    batch=make_batch,
    mesh="dp2",
    right=Program(own_experts, right_step),
    wrong=Program(own_experts, wrong_step),
    first="gradient of experts",
    says="experts on rank 0: differs",
)
