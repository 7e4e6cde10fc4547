"""A sum over ranks adds up once more in its backward.

The output of a sum is the same on every rank, and so is its gradient: backward has nothing to add. A collective whose
backward is a sum again, or a gradient that is marked as a summand, multiplies all gradients before it by the number of
ranks. The loss is right, and Adam hides the factor. The right program passes the gradient on.

pytorch/torchtitan#2106 (second error), and pytorch/pytorch#175867 for an all-reduce too many.
"""

import torch
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3, bias=False)
        self.head = nn.Linear(3, 3)
        self.group = None
        self.sums_again = False

    def forward(self, x):
        # (batch, 4) → (batch, 3)
        if self.group is None:
            return self.head(self.down(torch.tanh(self.up(x))))
        output = self.down(torch.tanh(self.up(copy(x, self.group))))
        output = reduce(output, self.group)
        if self.sums_again:
            # Adds up only in backward.
            output = copy(output, self.group)
        return self.head(output)


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def columns_and_rows(model, mesh):
    model.group = mesh.get_group()
    model.up.weight = nn.Parameter(own_part(model.up.weight.detach(), mesh, 0).clone())
    model.up.bias = nn.Parameter(own_part(model.up.bias.detach(), mesh, 0).clone())
    model.down.weight = nn.Parameter(own_part(model.down.weight.detach(), mesh, 1).clone())


def sums_again(model, mesh):
    columns_and_rows(model, mesh)
    # Wrong: each rank has the whole gradient of the sum.
    model.sums_again = True


BUG = KnownBug(
    title="a sum over tp adds up again in its backward",
    reports=("pytorch/torchtitan#2106", "pytorch/pytorch#175867"),
    model=Net,
    batch=make_batch,
    mesh="tp2",
    right=Program(columns_and_rows),
    wrong=Program(sums_again),
    first="gradient of down.weight",
    says=r"down.weight on rank 0: 2 times \(the size of tp\) what it should be",
)
