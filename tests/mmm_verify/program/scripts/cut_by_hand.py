"""A training script whose ranks have a part each of two matrices, as plain tensors."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, reduce

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16, bias=False), nn.Linear(16, 3, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(world)[rank].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, x):
        group = dist.group.WORLD
        return reduce(self.down(torch.tanh(self.up(copy(x, group)))), group)


model = MLP()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    F.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 3)).backward()
    optimizer.step()
