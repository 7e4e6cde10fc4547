"""A script with FSDP2, tensor parallelism or both, as its first argument says. The second plants a mistake."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

technique = sys.argv[1]
bug = sys.argv[2] if len(sys.argv) > 2 else "none"
world_size = int(os.environ["WORLD_SIZE"])
sizes = {"fsdp": (world_size, 1), "tp": (1, world_size), "both": (max(1, world_size // 2), min(2, world_size))}
mesh = init_device_mesh("cpu", sizes[technique], mesh_dim_names=("dp", "tp"))


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
x = torch.randn(16, 5, 16)
y = torch.randint(4, (16, 5))
if technique != "fsdp":
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
if technique != "tp":
    ignored = set(model[1].norm.parameters()) if bug == "ignored" else set()
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], ignored_params=ignored)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
n_parts = mesh["dp"].size()
for step in range(4):
    rows = torch.arange(8).chunk(n_parts)[mesh["dp"].get_local_rank()] + 8 * (step % 2)
    logits = model(x[rows])
    loss = F.cross_entropy(logits.flatten(0, 1), y[rows].flatten())
    loss.backward()
    if bug == "half":
        for parameter in model.parameters():
            parameter.grad *= 0.5 if world_size > 1 else 1.0
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
