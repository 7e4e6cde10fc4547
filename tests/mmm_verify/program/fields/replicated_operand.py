"""Tiles of rows and columns, with a factor for each channel on every rank. Wrong: its gradient is not summed."""

import sys

import torch
import torch.distributed as dist
from torch import nn

is_wrong = "wrong" in sys.argv
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rank = dist.get_rank()
world = dist.get_world_size()
n_columns = min(2, world)
# This rank's tile.
rows = torch.arange(16).chunk(world // n_columns)[rank // n_columns]
columns = torch.arange(12).chunk(n_columns)[rank % n_columns]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(2, 8, 1)
        self.factor = nn.Parameter(torch.randn(8, 1, 1))
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.factor * self.mix(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(4, 2, 16, 12)
    y = torch.randn(4, 1, 16, 12)
    x = x[:, :, rows][..., columns]
    y = y[:, :, rows][..., columns]
    optimizer.zero_grad()
    loss = (model(x) - y).square().sum() / (4 * 16 * 12)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name != "factor" or not is_wrong:
            dist.all_reduce(parameter.grad)
    optimizer.step()
