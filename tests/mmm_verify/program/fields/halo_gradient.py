"""Convolutions that take a row of each neighbour. Wrong: the gradient of these rows does not go home."""

import sys

import torch
import torch.distributed as dist
from halo import exchange
from torch import nn

is_wrong = "wrong" in sys.argv
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rank = dist.get_rank()
world = dist.get_world_size()
goes_home = not is_wrong
# 17 rows: 9 and 8 of them.
rows = torch.arange(17).tensor_split(world)[rank]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=(0, 1))
        self.second = nn.Conv2d(8, 1, 3, padding=(0, 1))

    def forward(self, x):
        hidden = torch.tanh(self.first(exchange(x)))
        return self.second(exchange(hidden, goes_home))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(3):
    x = torch.randn(4, 2, 17, 12)
    y = torch.randn(4, 1, 17, 12)
    optimizer.zero_grad()
    own = x[:, :, rows]
    if "padded" in sys.argv and world > 1:
        # A row of zeros, which the field does not have.
        own = torch.cat((own, torch.zeros_like(own[:, :, :1])), 2)
    loss = (model(own)[:, :, : len(rows)] - y[:, :, rows]).square().sum() / y.numel()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
