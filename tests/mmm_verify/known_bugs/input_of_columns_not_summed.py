"""A matrix is sharded by columns, and the gradient of its input is not added up.

The forward needs no communication, since all ranks have the input. In the backward each rank has the part that comes
from its own columns, and all that comes before trains on a part. The loss of the first step is right. The right
program adds up over tp in the backward of the input.

pytorch/torchtitan#1805, mended in pytorch/torchtitan#1878.
"""

import torch
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3, bias=False)
        self.group = None
        self.copies = True

    def forward(self, x):
        # (batch, 4) → (batch, 3)
        hidden = torch.tanh(self.inner(x))
        if self.group is not None and self.copies:
            hidden = copy(hidden, self.group)
        output = self.down(torch.tanh(self.up(hidden)))
        return output if self.group is None else reduce(output, self.group)


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def columns_and_rows(model, mesh):
    model.group = mesh.get_group()
    model.up.weight = nn.Parameter(own_part(model.up.weight.detach(), mesh, 0).clone())
    model.up.bias = nn.Parameter(own_part(model.up.bias.detach(), mesh, 0).clone())
    model.down.weight = nn.Parameter(own_part(model.down.weight.detach(), mesh, 1).clone())


def without_the_sum(model, mesh):
    columns_and_rows(model, mesh)
    # Wrong: each rank's columns give only a part of the input's gradient.
    model.copies = False


BUG = KnownBug(
    title="the gradient of the input of a matrix that is sharded by columns is not added up",
    reports=("pytorch/torchtitan#1805", "pytorch/torchtitan#1878"),
    model=Net,
    batch=make_batch,
    mesh="tp2",
    right=Program(columns_and_rows),
    wrong=Program(without_the_sum),
    first="gradient of inner.weight",
    says="inner.weight on rank 0: partial over tp",
)
