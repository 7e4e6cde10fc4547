"""A GroupNorm over the rows of all ranks. Wrong: over the rank's own."""

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
# Those of this rank.
rows = torch.arange(16).chunk(world)[dist.get_rank()]


class Total(torch.autograd.Function):
    """The sum over ranks, forward; backward too, as each rank's loss depends on it."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return Total.forward(ctx, gradient)


class GlobalNorm(nn.GroupNorm):
    def forward(self, x):
        if is_wrong:
            return super().forward(x)
        # (batch, groups, channels of a group, rows, columns)
        grouped = x.unflatten(1, (self.num_groups, -1))
        count = world * grouped[0, 0].numel()
        mean = Total.apply(grouped.sum((2, 3, 4), keepdim=True)) / count
        variance = Total.apply((grouped - mean).square().sum((2, 3, 4), keepdim=True)) / count
        normed = ((grouped - mean) / (variance + self.eps).sqrt()).flatten(1, 2)
        return normed * self.weight[:, None, None] + self.bias[:, None, None]


model = nn.Sequential(nn.Conv2d(2, 8, 1), GlobalNorm(2, 8), nn.Tanh(), nn.Conv2d(8, 1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    # A slope from row to row: each rank's mean is another one.
    x = torch.randn(4, 2, 16, 12) + torch.linspace(0, 2, 16)[:, None]
    y = torch.randn(4, 1, 16, 12)
    optimizer.zero_grad()
    output = model(x[:, :, rows])
    loss = F.mse_loss(output, y[:, :, rows])
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
