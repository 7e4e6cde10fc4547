"""Members of an ensemble, of each of which two ranks have half. Wrong: gradients are divided by all ranks."""

import sys

import torch
import torch.distributed as dist
from torch import nn

is_wrong = "wrong" in sys.argv
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
world = dist.get_world_size()
n_parts = min(2, world)
n_groups = world // n_parts
member, strip = divmod(dist.get_rank(), n_parts)
members = torch.arange(4).chunk(n_groups)[member]
columns = torch.arange(12).chunk(n_parts)[strip]
model = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(1, 2, 16, 12)
    y = torch.randn(1, 1, 16, 12)
    # (members, channels, rows, columns)
    perturbed = (x + 0.1 * torch.randn(4, 2, 16, 12))[members]
    optimizer.zero_grad()
    squares = (model(perturbed[..., columns]) - y[..., columns]).square()
    # The mean over the rank's members, and its part of the mean over the field.
    loss = squares.sum() / (len(members) * 16 * 12)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world if is_wrong else n_groups
    optimizer.step()
