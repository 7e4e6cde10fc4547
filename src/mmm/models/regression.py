"""A residual perceptron that predicts numbers, as people write one: its inputs are brought to mean 0 and spread 1 by
constants of the data, kept as buffers; it has no rules of its own for how its weights start, and its loss is the mean
square of what it is off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, OUTPUTS = 16, 4


class Standardize(nn.Module):
    """(x - mean) / spread, number by number."""

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.spread


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Regression(nn.Module):
    """(batch, 16) numbers to (batch, 4). A pipeline stage lacks some of the blocks, or has None for other parts."""

    def __init__(self, hidden: int = 32, n_blocks: int = 4) -> None:
        super().__init__()
        self.hidden = hidden
        self.standardize = Standardize(torch.linspace(-3, 3, FEATURES), torch.linspace(0.5, 4, FEATURES))
        self.blocks = nn.ModuleList(Block(FEATURES, hidden) for _ in range(n_blocks))
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.standardize(x) if self.standardize is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def parity_model() -> Regression:
    """A small one to try layouts on: 6 parts to cut into stages; ``hidden`` divides by 8."""
    return Regression()


def parity_batch(samples: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers of different size, (samples, 16) float64, and waves of their sums, (samples, 4) float64."""
    x = torch.randn(samples, FEATURES, generator=numbers, dtype=torch.float64)
    waves = x.view(samples, OUTPUTS, -1).sum(2).sin()
    return x * torch.linspace(0.5, 4, FEATURES) + torch.linspace(-3, 3, FEATURES), waves


def parity_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The sum of squares: the proof divides it by the numbers in the targets of the global batch."""
    return F.mse_loss(output, targets, reduction="sum")
