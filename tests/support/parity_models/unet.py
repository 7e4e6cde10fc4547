"""A U-Net on fields of an ocean, whose rows cp splits. It is written as people write one: nothing in it knows of ranks.

It has what such models have: paddings of each kind, a stride, a dilation, a pooling, a transposed convolution, a linear
upsampling, skips, norms of each sample and of the batch, attention of all places to all, and learned positions. Some of
the field is land, which has no targets: in the north more than in the south, so that each rank counts another number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmm.layout import PADDING
from mmm.nn.init import Init
from mmm.parallel.plan import Field, Plan
from mmm.parallel.tp.replicated import Replicated
from mmm_lab.parity.parity_model import ParityModel

# Three levels: 28, 14 and 7 rows, which neither 3 ranks nor 4 divide.
ROWS = 28
COLUMNS = 12


class Block(nn.Module):
    """(batch, before, rows, columns) to (batch, after, rows / stride, columns / stride)."""

    def __init__(self, before: int, after: int, stride: int = 1, padding_mode: str = "zeros") -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, 1, padding_mode=padding_mode)
        self.norm = nn.GroupNorm(2, after)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class UNet(nn.Module):
    """(batch, 3, 28, 12) to (batch, 2, 28, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, ROWS, COLUMNS))
        self.stem = nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect")
        self.first = Block(4, 4, padding_mode="circular")
        self.down = Block(4, 6, stride=2)
        self.second = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=2, dilation=2, bias=False),
            nn.BatchNorm2d(6),
            nn.GELU(),
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = Block(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.third = Block(12, 6)
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear")
        self.fourth = Block(10, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        full = self.first(self.stem(x) + self.position)
        half = self.second(self.down(full))
        deep = self.bottom(self.pool(half))
        # (batch, rows · columns, channels)
        places = deep.flatten(2).transpose(1, 2)
        attended, _ = self.attention(places, places, places, need_weights=False)
        deep = deep + attended.transpose(1, 2).reshape(deep.shape)
        half = self.third(torch.cat((self.up(deep), half), 1))
        return self.head(self.fourth(torch.cat((self.upsample(half), full), 1)))

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn: all alike, so that no gradient is small."""
        return Init("uniform", 0.4)


def make_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make noise, (samples, 3, 28, 12) float64, and noise with land in it, (samples, 2, 28, 12) float64."""
    fields = torch.randn(samples, 3, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 2, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    # (rows, 1)
    share = torch.linspace(0.9, 0.1, ROWS)[:, None]
    is_land = torch.rand(samples, 1, ROWS, COLUMNS, generator=generator) < share
    return fields, targets.masked_fill(is_land, PADDING)


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """The sum of squares over the sea."""
    is_sea = targets != PADDING
    return (output - targets).masked_fill(~is_sea, 0.0).square().sum()


def unet_plan() -> Plan:
    """The plan of `UNet`."""
    return Plan(
        # It reads the parameters of its output layer without calling it.
        tensor={"attention": Replicated()},
        rest=Replicated(),
        fsdp_units=("first", "down", "second", "bottom", "third", "fourth"),
        checkpointed=("first", "down", "bottom", "third", "fourth"),
        space=Field((3, ROWS, COLUMNS), parameters={"position": 2}),
    )


# A micro-batch does not know the statistics of the batch.
PARITY = ParityModel(model=UNet, plan=unet_plan, batch=make_batch, loss=squared_error, least_microbatches=1)
