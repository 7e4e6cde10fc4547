"""A loss over the sea only. Wrong: each rank divides by the sea points of its own rows, and the mean is taken."""

import sys

import torch
import torch.distributed as dist
from torch import nn

is_wrong = "wrong" in sys.argv
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
world = dist.get_world_size()
# Those of this rank.
rows = torch.arange(16).tensor_split(world)[dist.get_rank()]
if "dropped" in sys.argv:
    # 16 rows do not divide over 3 ranks.
    rows = torch.arange(16 // world) + 16 // world * dist.get_rank()
# More of it in the south.
sea = (torch.rand(16, 12) < torch.linspace(0.2, 0.9, 16)[:, None])[rows]
model = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(4, 2, 16, 12)
    y = torch.randn(4, 1, 16, 12)
    optimizer.zero_grad()
    squares = (model(x[:, :, rows]) - y[:, :, rows]).square() * sea
    count = 4 * sea.sum().double()
    if is_wrong:
        count *= world
    else:
        dist.all_reduce(count)
    loss = squares.sum() / count
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
