"""Two fields lie over the ranks by other bounds, and an operator multiplies row by row what each rank has.

Both are sharded along the same dim, and have the same full shape. Where a rank has one row of one field, it is
broadcast to the rows of the other, which belong to other places: nothing fails. The right program cuts both alike.

NVIDIA/physicsnemo#1943, mended in NVIDIA/physicsnemo#1959.
"""

import torch
from torch import nn

from support.by_hand import add_up
from support.known_bugs import KnownBug, Program

# Of 2 places: how many each rank has.
ARMS = (0, 2)
FORCES = (1, 1)


class Torque(nn.Module):
    """The cross product of given arms with forces that a matrix computes from features."""

    def __init__(self):
        super().__init__()
        self.force = nn.Linear(4, 3)

    def forward(self, arms, features):
        # (batch, places, 3) and (batch, places, 4) → (batch, places, 3)
        return torch.linalg.cross(arms, self.force(features))


def make_batch():
    return torch.randn(4, 2, 3), torch.randn(4, 2, 4), torch.randn(4, 2, 3)


def step_with(places_of_features):
    def step(model, batch, mesh):
        arms, features, targets = batch
        count = targets.numel()
        if mesh is not None:
            rank = mesh.get_local_rank()
            arms = arms.split(ARMS, 1)[rank]
            targets = targets.split(ARMS, 1)[rank]
            features = features.split(places_of_features, 1)[rank]
        return (model(arms, features) - targets).square().sum() / count

    return step


BUG = KnownBug(
    title="two fields are sharded along one dim by other bounds",
    reports=("NVIDIA/physicsnemo#1943", "NVIDIA/physicsnemo#1959"),
    model=Torque,
    batch=make_batch,
    mesh="sp2",
    right=Program(add_up, step_with(ARMS)),
    wrong=Program(add_up, step_with(FORCES)),
    first="output of the model on rank 1",
    # Rank 0 has no place, and a loss of 0.
    says="the loss: is .* on each rank whose loss is not 0, but",
)
