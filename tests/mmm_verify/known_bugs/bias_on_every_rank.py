"""A matrix is sharded by rows, and every rank adds the bias before the sum over ranks.

The outputs are summands, and with them N biases are added up. The model still trains, with a bias that is worth N
times what it says; a checkpoint of it is wrong on any other layout. The right program adds the bias after the sum.

pytorch/torchtitan#2106: experts with biases under tensor parallelism.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Down(nn.Linear):
    group = None
    before_the_sum = False

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        if self.before_the_sum:
            return reduce(super().forward(x), self.group)
        return reduce(F.linear(x, self.weight), self.group) + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), Down(8, 3)
        self.group = None

    def forward(self, x):
        # (batch, 4) → (batch, 3)
        if self.group is not None:
            x = copy(x, self.group)
        return self.down(torch.tanh(self.up(x)))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def columns_and_rows(model, mesh):
    model.group = model.down.group = mesh.get_group()
    model.up.weight = nn.Parameter(own_part(model.up.weight.detach(), mesh, 0).clone())
    model.up.bias = nn.Parameter(own_part(model.up.bias.detach(), mesh, 0).clone())
    model.down.weight = nn.Parameter(own_part(model.down.weight.detach(), mesh, 1).clone())


def biases_are_added_up(model, mesh):
    columns_and_rows(model, mesh)
    # Wrong: the sum over ranks then has the bias N times.
    model.down.before_the_sum = True


BUG = KnownBug(
    title="every rank adds the bias of a matrix that is sharded by rows",
    reports=("pytorch/torchtitan#2106",),
    model=Net,
    batch=make_batch,
    mesh="tp2",
    right=Program(columns_and_rows),
    wrong=Program(biases_are_added_up),
    first="output of down on rank 0",
    says="the loss: is .* on every rank",
)
