"""Models of fields, written for one device, with their batches and steps, as ``mmm verify MODEL --space`` gets them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.parity_models.unet import COLUMNS, ROWS
from support.parity_models.unet import UNet as UNet

# Neither divides by 2 or 3, and there are as many rows as channels inside.
SMALL = (3, 11, 6)
LATITUDES = torch.linspace(-1.4, 1.4, ROWS, dtype=torch.float64).cos()[:, None]


class Net(nn.Module):
    """(batch, 3, 11, 6) to (batch, 2, 11, 6), with learned fields of 11 rows and of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 11, 3, padding=1, padding_mode="circular")
        self.position = nn.Parameter(torch.randn(11, 11, 6))
        self.down = nn.Conv2d(11, 4, 3, stride=2, padding=1)
        self.deep = nn.Parameter(torch.randn(4, 6, 3))
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.Upsample(SMALL[1:], mode="bilinear")
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.down(torch.tanh(self.stem(x)) + self.position)
        return self.head(self.up(self.norm(half + self.deep)))


class Last(Net):
    """(batch, 11, 6, 3) to (batch, 11, 6, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Pooled(nn.Sequential):
    """(batch, 3, 11, 6) to (batch, 5)."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


class Anomaly(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean((2, 3), keepdim=True))


class Scaled(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(scale * x)


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 2, 1), nn.Dropout2d(0.25))


def fields() -> tuple[Tensor, Tensor]:
    return torch.randn(4, *SMALL), torch.randn(4, 2, *SMALL[1:])


def fields_last() -> tuple[Tensor, Tensor]:
    return torch.randn(4, *SMALL[1:], 3), torch.randn(4, *SMALL[1:], 2)


def fields_with_labels() -> tuple[Tensor, Tensor]:
    return torch.randn(4, *SMALL), torch.randint(2, (4, *SMALL[1:]))


def fields_of_classes() -> tuple[Tensor, Tensor]:
    return torch.randn(4, *SMALL), torch.randint(5, (4,))


def ocean() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, ROWS, COLUMNS), torch.randn(4, 2, ROWS, COLUMNS)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def by_latitude(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean square, weighted by latitude. The weights have all rows."""
    inputs, targets = batch
    squares = (model(inputs) - targets).square()
    return (squares * LATITUDES).mean() / LATITUDES.mean()


def two_steps_ahead(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What the model has computed is what it computes with next."""
    inputs, targets = batch
    first = model(inputs)
    second = model(torch.cat((first, inputs[:, 2:]), 1))
    return (first - targets).square().mean() + (second - targets).square().mean()


def by_name(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model's input by its name."""
    inputs, targets = batch
    return (model(x=inputs) - targets).square().mean()


def of_halves(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Fields of two sizes."""
    inputs, _ = batch
    return model(inputs).square().mean() + model(inputs[:, :, ::2]).square().mean()
