"""A field through four parts one after the other, between which a pipeline may split: down by a stride, and up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.parallel.plan import Field, Plan
from mmm_lab.parity.parity_model import ParityModel
from support.parity_models.unet import Block

# 11 rows after the stride: 5 and 6 on two ranks.
ROWS = 22
COLUMNS = 10


class Encoder(nn.Module):
    """(batch, 3, 22, 10) to (batch, 2, 22, 10). A stage of a pipeline has None for the parts that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(3, 4)
        self.down = Block(4, 6, stride=2)
        self.up = nn.ConvTranspose2d(6, 4, 4, 2, 1)
        self.head = nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.down, self.up, self.head):
            if layer is not None:
                x = layer(x)
        return x


def make_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make noise: (samples, 3, 22, 10) and (samples, 2, 22, 10), float64."""
    fields = torch.randn(samples, 3, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 2, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    return fields, targets


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="sum")


def encoder_plan() -> Plan:
    """The plan of `Encoder`."""
    return Plan(
        tensor={},
        fsdp_units=("first", "down"),
        stages=("first", "down", "up", "head"),
        space=Field((3, ROWS, COLUMNS)),
    )


PARITY = ParityModel(model=Encoder, plan=encoder_plan, batch=make_batch, loss=squared_error)
