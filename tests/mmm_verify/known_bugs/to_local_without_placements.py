"""A replicated DTensor is turned into a plain tensor, and nothing says that its gradient will be a summand.

`to_local()` takes the gradient to be placed as the tensor is: replicated. Where the ranks' inputs differ, the gradient
is a part of a sum, and is taken for all of it. Forward is right. The right program passes
`grad_placements=[Partial()]`.

pytorch/torchtitan#2532, about its #2217: a norm's weight on a mesh with tp.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from support.by_hand import copy, gather
from support.known_bugs import KnownBug, Program, own_part


class Scaled(nn.Module):
    """Scales the outputs of all heads by one weight."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(6, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.group = None
        self.grad_placements = None

    def forward(self, x):
        # (batch, 6) → (batch, 8): two heads of four channels
        if self.group is not None:
            x = copy(x, self.group)
        scale = self.scale
        if isinstance(scale, DTensor):
            scale = scale.to_local(grad_placements=self.grad_placements)
        output = (self.heads(x).unflatten(-1, (-1, 4)).tanh() * scale).flatten(-2)
        return output if self.group is None else gather(output, self.group)


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 8)


def shard_heads(model, mesh):
    model.group = mesh.get_group()
    model.heads.weight = nn.Parameter(own_part(model.heads.weight.detach(), mesh, 0).clone())
    replicated = DTensor.from_local(model.scale.detach(), mesh, [Replicate()], run_check=False)
    model.scale = nn.Parameter(replicated)


def says_partial(model, mesh):
    shard_heads(model, mesh)
    model.grad_placements = [Partial()]


BUG = KnownBug(
    title="the gradient of a replicated DTensor's to_local() is taken for the sum",
    reports=("pytorch/torchtitan#2532",),
    model=Scaled,
    batch=make_batch,
    mesh="tp2",
    right=Program(says_partial),
    wrong=Program(shard_heads),
    first="gradient of scale",
    says="scale on rank 0: partial over tp",
)
