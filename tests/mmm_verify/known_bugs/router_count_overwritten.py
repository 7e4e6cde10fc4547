"""A count of this rank's tokens is overwritten by that of all ranks, and the router's loss grows with the ranks.

A mean of the router's loss over a rank's own tokens is multiplied by their number, and divided by that of all ranks.
An all-reduce in place turns the first number into the second, for someone else's use. The router's loss is then N
times too strong. It only goes backward, so no number in the log shows it. The right program reduces a copy.

NVIDIA/Megatron-LM#7452, finding 10.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up
from support.known_bugs import KnownBug, Program, own_part


class AlsoMinimize(torch.autograd.Function):
    """Passes outputs on; its backward starts that of a second loss as well."""

    @staticmethod
    def forward(ctx, outputs, loss):
        ctx.save_for_backward(loss)
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))
        self.group = None
        self.overwrites = False

    def forward(self, x):
        # (batch, positions, 6) → (batch, positions, 4)
        logits = self.router(x)
        output = torch.einsum("bpi,eio,bpe->bpo", x, self.experts, logits.softmax(-1))
        own_count = torch.tensor(float(logits[..., 0].numel()))
        all_count = own_count if self.overwrites else own_count.clone()
        if self.group is not None:
            dist.all_reduce(all_count, group=self.group)
        mean = logits.logsumexp(-1).square().mean()
        return AlsoMinimize.apply(output, mean * own_count / all_count)


def make_batch():
    return torch.randn(4, 6, 6), torch.randn(4, 6, 4)


def parallelize(model, mesh):
    model.group = mesh.get_group()
    add_up(model, mesh)


def overwrites(model, mesh):
    parallelize(model, mesh)
    # Wrong: the all-reduce then changes the rank's own count as well.
    model.overwrites = True


def step(model, batch, mesh):
    inputs, targets = batch
    count = targets.numel()
    if mesh is not None:
        inputs, targets = own_part(inputs, mesh, 1), own_part(targets, mesh, 1)
    return F.mse_loss(model(inputs), targets, reduction="sum") / count


BUG = KnownBug(
    title="an all-reduce in place overwrites a count that the router's loss needs",
    reports=("NVIDIA/Megatron-LM#7452",),
    model=Mixture,
    batch=make_batch,
    mesh="tp2",
    right=Program(parallelize, step),
    wrong=Program(overwrites, step),
    first="gradient of router.weight",
    says="router.weight on rank 0: differs",
)
