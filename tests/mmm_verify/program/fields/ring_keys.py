"""Tokens over ranks; keys and values go around a ring. Wrong: backward begins with the keys that came last."""

import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
world = dist.get_world_size()


def passed_on(x):
    by_rank = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(by_rank, x.contiguous())
    # What the rank before has.
    return by_rank[dist.get_rank() - 1]


class Ring(torch.autograd.Function):  # linear attention, q kᵀ v, of all tokens
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        output = torch.zeros_like(q)
        for _ in range(world):
            if "wrong" in sys.argv:
                ctx.save_for_backward(q, k, v)
            output += q @ (k.mT @ v)
            k, v = passed_on(k), passed_on(v)
        return output

    @staticmethod
    def backward(ctx, gradient):
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(world):
            dq += gradient @ (v.mT @ k)
            dk += v @ (gradient.mT @ q)
            dv += k @ (q.mT @ gradient)
            k, v, dk, dv = passed_on(k), passed_on(v), passed_on(dk), passed_on(dv)
        return dq, dk, dv


class Attention(nn.Linear):
    def forward(self, x):
        return torch.tanh(Ring.apply(*super().forward(x).chunk(3, -1)))


model = nn.Sequential(nn.Embedding(50, 8), Attention(8, 24), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    ids = torch.randint(50, (4, 16)).chunk(world, 1)[dist.get_rank()]
    y = torch.randn(4, 16, 3).chunk(world, 1)[dist.get_rank()]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(ids), y).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.div_(world))
    optimizer.step()
