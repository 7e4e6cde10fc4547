"""Each rank has its rows of the heights in a buffer. Wrong: all have those of rank 0, as DDP leaves them."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

is_wrong = "wrong" in sys.argv
dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
# Those of this rank.
rows = torch.arange(16).chunk(dist.get_world_size())[dist.get_rank()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("heights", torch.randn(16, 12)[rows])
        self.mix = nn.Conv2d(3, 8, 1)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        heights = self.heights.expand(len(x), 1, -1, -1)
        return self.out(torch.tanh(self.mix(torch.cat((x, heights), 1))))


model = Net()
if is_wrong:
    dist.broadcast(model.heights, 0)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(4, 2, 16, 12)
    y = torch.randn(4, 1, 16, 12)
    optimizer.zero_grad()
    output = model(x[:, :, rows])
    loss = F.mse_loss(output, y[:, :, rows])
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
