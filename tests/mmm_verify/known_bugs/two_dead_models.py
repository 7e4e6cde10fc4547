"""A parallel run agrees with one device to the last digit, because neither of them learns.

The weights were left uninitialized, or all labels are ignored: every gradient is 0, and the loss does not depend on
the input. Any two programs agree then, and a test that compares them passes. The right program has a model that
learns; of the wrong one nothing can be said.

NVIDIA-NeMo/Automodel#3701: parity tests passed with two dead models.
"""

import torch
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, x):
        # (batch, 4) → (batch, 3)
        return self.head(torch.tanh(self.body(x))) * self.gate


def alive():
    return Gated(1.0)


def dead():
    # Wrong: the gate is closed, so that no gradient passes.
    return Gated(0.0)


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


BUG = KnownBug(
    title="two runs agree because neither learns",
    reports=("NVIDIA-NeMo/Automodel#3701",),
    model=alive,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged),
    wrong=Program(averaged, model=dead),
    first="every gradient on one device",
    says="every gradient on one device",
    result="not comparable",
)
