"""An operator takes a sharded field and a replicated vector, whose gradient stays that of a rank's own places.

The loss of the first step is right, and so are the gradients of the matrices, which are added up after backward: the
vector is no matrix of a layer, and the operator that took it had to add up its gradient. The right program does so.

NVIDIA/physicsnemo#1944, mended in NVIDIA/physicsnemo#1947.
"""

import torch
from torch import nn

from support.by_hand import add_up
from support.known_bugs import KnownBug, Program, own_part


class Rotation(nn.Module):
    """The velocity of places that rotate about an axis, which is learned, and a matrix of it."""

    def __init__(self):
        super().__init__()
        self.axis = nn.Parameter(torch.randn(3))
        self.matrix = nn.Linear(3, 2)

    def forward(self, places):
        # (batch, places, 3) → (batch, places, 2)
        return self.matrix(torch.linalg.cross(self.axis.expand_as(places), places))


def make_batch():
    return torch.randn(4, 6, 3), torch.randn(4, 6, 2)


def step(model, batch, mesh):
    places, targets = batch
    count = targets.numel()
    if mesh is not None:
        places = own_part(places, mesh, 1)
        targets = own_part(targets, mesh, 1)
    return (model(places) - targets).square().sum() / count


def only_matrices(model, mesh):
    # Wrong: the axis gets what a rank's own places say.
    add_up(model.matrix, mesh)


BUG = KnownBug(
    title="the gradient of a replicated operand of a sharded field is not added up",
    reports=("NVIDIA/physicsnemo#1944", "NVIDIA/physicsnemo#1947"),
    model=Rotation,
    batch=make_batch,
    mesh="sp2",
    right=Program(add_up, step),
    wrong=Program(only_matrices, step),
    first="gradient of axis",
    says="axis on rank 0: ",
)
