"""Models of fields, written for one device, with their batches and steps, as ``mmm verify MODEL --space`` gets them."""

import torch
import torch.nn.functional as F
from torch import nn

from support.parity_models.unet import COLUMNS, ROWS
from support.parity_models.unet import UNet as UNet

# Neither divides by 2 or 3, and there are as many rows as channels inside.
PLACES = (11, 6)
SMALL = (3, *PLACES)
LATITUDES = torch.linspace(-1.4, 1.4, ROWS, dtype=torch.float64).cos()[:, None]


class Net(nn.Module):
    """(batch, 3, 11, 6) to (batch, 2, 11, 6), with learned fields of 11 rows and of 6."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 11, 3, padding=1, padding_mode="circular")
        self.position = nn.Parameter(torch.randn(11, 11, 6))
        self.down = nn.Conv2d(11, 4, 3, stride=2, padding=1)
        self.deep = nn.Parameter(torch.randn(4, 6, 3))
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.Upsample(PLACES, mode="bilinear")
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        # (batch, 11, 11, 6)
        full = torch.tanh(self.stem(x))
        full = full + self.position
        # (batch, 4, 6, 3)
        half = self.down(full)
        half = self.norm(half + self.deep)
        return self.head(self.up(half))


class Last(Net):
    """(batch, 11, 6, 3) to (batch, 11, 6, 2)."""

    def forward(self, x):
        channels_first = x.permute(0, 3, 1, 2)
        output = super().forward(channels_first)
        return output.permute(0, 2, 3, 1)


class Pooled(nn.Sequential):
    """(batch, 3, 11, 6) to (batch, 5)."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        )


class Anomaly(Net):
    def forward(self, x):
        # An operator over the whole field, in no module of its own.
        mean = x.mean((2, 3), keepdim=True)
        return super().forward(x - mean)


class Scaled(Net):
    def forward(self, x, scale=1.0):
        return super().forward(scale * x)


class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 2, 1), nn.Dropout2d(0.25))


def fields():
    return torch.randn(4, *SMALL), torch.randn(4, 2, *PLACES)


def fields_last():
    return torch.randn(4, *PLACES, 3), torch.randn(4, *PLACES, 2)


def fields_with_labels():
    return torch.randn(4, *SMALL), torch.randint(2, (4, *PLACES))


def fields_of_classes():
    return torch.randn(4, *SMALL), torch.randint(5, (4,))


def ocean():
    return torch.randn(4, 3, ROWS, COLUMNS), torch.randn(4, 2, ROWS, COLUMNS)


def cross_entropy(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def by_latitude(model, batch):
    """The mean square, weighted by latitude. The weights have all rows."""
    inputs, targets = batch
    errors = model(inputs) - targets
    weighted = errors.square() * LATITUDES
    return weighted.mean() / LATITUDES.mean()


def two_steps_ahead(model, batch):
    """What the model has computed is what it computes with next."""
    inputs, targets = batch
    first = model(inputs)
    # The third channel does not change.
    inputs = torch.cat((first, inputs[:, 2:]), 1)
    second = model(inputs)
    errors = torch.stack((first, second)) - targets
    return errors.square().mean()


def by_name(model, batch):
    """The model's input by its name."""
    inputs, targets = batch
    output = model(x=inputs)
    return (output - targets).square().mean()


def of_halves(model, batch):
    """Fields of two sizes."""
    inputs, _ = batch
    halves = inputs[:, :, ::2]
    loss = model(inputs).square().mean()
    return loss + model(halves).square().mean()
