"""The norm of the gradients counts what all tensor-parallel ranks have once for each of them.

Squares are added up over the ranks, which is right for shards. Norm weights, biases and routers are the same on each
rank, and are counted N times. The norm is too large, and clipping cuts more than it should. The right program adds up
only the squares of shards.

NVIDIA-NeMo/RL#3788, and ROCm/TransformerEngine#715.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, gather
from support.known_bugs import KnownBug, Program, own_part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4, bias=False)
        self.mesh = None

    def forward(self, x):
        # (batch, 6) → (batch, 4)
        hidden = self.norm(x)
        if self.mesh is None:
            return self.head(hidden)
        return gather(self.head(copy(hidden, self.mesh.get_group())), self.mesh.get_group())


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 4)


def parallelize(model, mesh):
    model.mesh = mesh
    model.head.weight = nn.Parameter(own_part(model.head.weight.detach(), mesh, 0).clone())


def clip(model, batch, mesh, counted):
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    squares = {name: parameter.grad.square().sum() for name, parameter in model.named_parameters()}
    if mesh is not None:
        for name in counted:
            dist.all_reduce(squares[name])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, sum(squares.values()).sqrt())
    return loss.detach()


def right_step(model, batch, mesh):
    return clip(model, batch, mesh, counted=["head.weight"])


def wrong_step(model, batch, mesh):
    # Wrong: the norm's parameters are the same on every rank.
    return clip(model, batch, mesh, counted=["head.weight", "norm.weight", "norm.bias"])


BUG = KnownBug(
    title="the norm counts what is not sharded N times",
    reports=("NVIDIA-NeMo/RL#3788", "ROCm/TransformerEngine#715"),
    model=Net,
    batch=make_batch,
    mesh="tp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="the norm that the step clips by",
    says="counted what is not sharded 2 times",
)
