"""Parts that overlap, whose outputs are trimmed. Wrong: each is trimmed by a row, also where the field begins."""

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
own = torch.arange(17).tensor_split(world)[rank]
start, end = own[0].item(), own[-1].item() + 1
# Two rows more on each side, as far as there are any.
halo_start, halo_end = max(0, start - 2), min(17, end + 2)
# Two convolutions: each needs a row of the neighbours.
model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trim = start - halo_start
if is_wrong:
    trim = min(2, halo_end - halo_start - len(own))
for _ in range(3):
    x = torch.randn(4, 2, 17, 12)
    y = torch.randn(4, 1, 17, 12)
    optimizer.zero_grad()
    output = model(x[:, :, halo_start:halo_end])[:, :, trim : trim + len(own)]
    loss = (output - y[:, :, start:end]).square().sum() / y.numel()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
