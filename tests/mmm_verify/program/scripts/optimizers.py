"""A script whose first argument names what takes its steps: two optimizers, ZeRO's, a closure, FSDP1, and others."""

import contextlib
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(16, 8)
y = torch.randn(16, 4)


def make(n_inputs, n_outputs):
    model = nn.Sequential(nn.Linear(n_inputs, 16), nn.Tanh(), nn.Linear(16, n_outputs))
    if kind.startswith("fsdp1"):
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=kind == "fsdp1-original")
    return DistributedDataParallel(model)


class Twice(torch.optim.Optimizer):
    """Takes two steps of another optimizer in one, the second by a tenth of the gradients."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self):
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= 10
        self.inner.step()


model = make(8, 4)
if kind == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
elif kind == "twice":
    optimizer = Twice(torch.optim.SGD(model.parameters(), lr=1e-2))
elif kind == "closure":
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
if kind == "gan":
    judge = make(4, 1)
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-2)


def backward(rows):
    """One closure of an optimizer that asks for one."""
    optimizer.zero_grad()
    autocast = torch.autocast("cpu", torch.bfloat16) if kind == "bf16" else contextlib.nullcontext()
    with autocast:
        output = model(x[rows])
    loss = F.mse_loss(output.float(), y[rows])
    loss.backward()
    return loss


for step in range(4):
    rows = torch.arange(8).chunk(world_size)[rank] + 8 * (step % 2)
    if kind == "gan":
        fake = model(x[rows])
        judge_optimizer.zero_grad()
        F.softplus(-judge(y[rows])).mean().backward()
        F.softplus(judge(fake.detach())).mean().backward()
        judge_optimizer.step()
        optimizer.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        optimizer.step()
    elif kind == "closure":
        optimizer.step(partial(backward, rows))
    else:
        backward(rows)
        optimizer.step()
