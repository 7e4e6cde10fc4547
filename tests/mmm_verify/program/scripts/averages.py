"""A training script whose ranks average in or after the optimizer's step: ``averages.py KIND [DTYPE]``."""

import sys

import torch
import torch.distributed as dist
from torch import nn

KIND = sys.argv[1]
GLOBAL = 16
if "float64" in sys.argv:
    torch.set_default_dtype(torch.float64)

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
share = GLOBAL // world
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= world


class Distributed(torch.optim.SGD):
    """Averages the gradients in its step, as Horovod's optimizer does."""

    @torch.no_grad()
    def step(self, closure=None):
        average([p.grad for p in model.parameters()])
        if KIND == "divided_twice" and world > 1:
            for p in model.parameters():
                p.grad /= world
        if KIND == "nearly" and world > 1:
            model[0].bias.grad *= 1 + 1e-8
        super().step()


def average_gradients(*_):
    average([p.grad for p in model.parameters()])


if KIND in ("in_step", "divided_twice", "nearly"):
    optimizer = Distributed(model.parameters(), 0.1)
elif KIND == "adamw_weights":
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
else:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
if KIND == "hook":
    optimizer.register_step_pre_hook(average_gradients)

for _ in range(2 if KIND == "weights" else 4):
    inputs, targets = torch.randn(GLOBAL, 6), torch.randn(GLOBAL, 3)
    own = slice(rank * share, (rank + 1) * share)
    loss = (model(inputs[own]) - targets[own]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        if KIND in ("weights", "adamw_weights", "evaluates"):
            average(list(model.parameters()))
        elif KIND == "forgotten":
            average(list(model.parameters())[:-1])
    if KIND == "evaluates":
        # All ranks wait for the first one.
        if rank == 0:
            model.eval()(inputs)
            model.train()
        dist.barrier()
