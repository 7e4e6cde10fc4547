"""Each rank's loss is the mean over its own rows, and they have unequally many. Wrong: their gradients count alike."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

is_wrong = "wrong" in sys.argv
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
world = dist.get_world_size()
# 17 rows: 9 and 8 of them.
rows = torch.arange(17).tensor_split(world)[dist.get_rank()]
share = 1 / world if is_wrong else len(rows) / 17
model = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(4, 2, 17, 12)
    y = torch.randn(4, 1, 17, 12)
    optimizer.zero_grad()
    output = model(x[:, :, rows])
    loss = F.mse_loss(output, y[:, :, rows])
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.mul_(share))
    optimizer.step()
