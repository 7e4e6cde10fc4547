"""Activations are saved in parts on the tensor-parallel ranks, and gathered from another group to be recomputed.

To save memory each rank keeps a part of a layer's input, and its backward gathers the input and runs the layer again.
If it gathers over a global group and not over the model's, parts of other samples come in. Forward and loss are right;
only what is recomputed is not. The right program passes the model's group.

NVIDIA/Megatron-LM#7452, finding 4.
"""

import torch
import torch.distributed as dist
from torch import nn

from support.by_hand import average
from support.known_bugs import KnownBug, Program


class Recomputed(torch.autograd.Function):
    """Runs a linear map and a tanh. Keeps a part of the input, and computes all again in backward."""

    @staticmethod
    def forward(ctx, x, weight, own_group, gather_group):
        ctx.group = gather_group
        # (batch, own channels)
        own = x.chunk(dist.get_world_size(own_group), -1)[dist.get_rank(own_group)].contiguous()
        ctx.save_for_backward(own, weight)
        return (x @ weight.T).tanh()

    @staticmethod
    def backward(ctx, gradient):
        own, weight = ctx.saved_tensors
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, own, group=ctx.group)
        x = torch.cat(parts, -1)
        before_tanh = gradient * (1 - (x @ weight.T).tanh().square())
        return before_tanh @ weight, before_tanh.T @ x, None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.own_group, self.gather_group = None, None

    def forward(self, x):
        # (batch, 6), in and out
        if self.own_group is None:
            return (x @ self.weight.T).tanh()
        return Recomputed.apply(x, self.weight, self.own_group, self.gather_group)


def make_model():
    return nn.Sequential(Layer(), nn.Linear(6, 4))


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 4)


def parallelize(model, mesh, gathers_over):
    model[0].own_group = mesh["tp"].get_group()
    model[0].gather_group = mesh[gathers_over].get_group()
    average(model, mesh["dp"].get_group())


def over_tp(model, mesh):
    parallelize(model, mesh, "tp")


def over_dp(model, mesh):
    # Wrong: the activation was sharded over tp.
    parallelize(model, mesh, "dp")


BUG = KnownBug(
    title="an activation is gathered from the wrong group to be recomputed",
    reports=("NVIDIA/Megatron-LM#7452",),
    model=make_model,
    batch=make_batch,
    mesh="dp2,tp2",
    right=Program(over_tp),
    wrong=Program(over_dp),
    first="gradient of 0.weight",
    says="0.weight on rank 0: differs",
)
