"""A script that averages its gradients itself, accumulates them over micro-batches, and clips."""

import sys

import torch
import torch.distributed as dist
from torch import nn

bug = sys.argv[1] if len(sys.argv) > 1 else "none"
dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed({"start": rank, "other_start": world_size}.get(bug, 0))
norm = nn.BatchNorm1d(32) if bug == "batch_norm" else nn.Identity()
model = nn.Sequential(nn.Linear(16, 32), norm, nn.Tanh(), nn.Linear(32, 4))
torch.manual_seed(1)
x = torch.randn(16, 16)
y = torch.randn(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# (2 micro-batches, samples of this rank)
own = torch.arange(8).chunk(1 if bug == "alike" else world_size)[0 if bug == "alike" else rank].chunk(2)


def average():
    for name, parameter in model.named_parameters():
        if bug == "forgotten" and name == "3.bias":
            continue
        dist.all_reduce(parameter.grad)
        if bug != "sum":
            parameter.grad /= world_size


for step in range(4):
    for micro_batch in own:
        rows = micro_batch + 8 * (step % 2)
        loss = (model(x[rows]) - y[rows]).square().mean() / len(own)
        loss.backward()
    if bug == "clip_first":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        average()
    else:
        average()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
