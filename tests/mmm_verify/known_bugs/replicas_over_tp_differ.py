"""What tensor-parallel ranks have copies of is drawn anew on each of them.

Adapters, norms and routers are not sharded: all ranks of tp must have the same. After loading, or after new modules
are added, each rank draws its own. Every rank's forward is a mix of two models, and a checkpoint that saves one of
the copies is a third. The right program broadcasts what is replicated.

NVIDIA-NeMo/Automodel#3822: tensor-parallel replicas that differed before they were saved.
"""

import torch
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(4, 4, bias=False)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3, bias=False)
        self.group = None

    def forward(self, x):
        # (batch, 4) → (batch, 3)
        hidden = x + self.adapter(x)
        if self.group is None:
            return self.down(torch.tanh(self.up(hidden)))
        return reduce(self.down(torch.tanh(self.up(copy(hidden, self.group)))), self.group)


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def columns_and_rows(model, mesh):
    model.group = mesh.get_group()
    model.up.weight = nn.Parameter(own_part(model.up.weight.detach(), mesh, 0).clone())
    model.up.bias = nn.Parameter(own_part(model.up.bias.detach(), mesh, 0).clone())
    model.down.weight = nn.Parameter(own_part(model.down.weight.detach(), mesh, 1).clone())


def draws_adapters(model, mesh):
    columns_and_rows(model, mesh)
    if mesh.get_local_rank() > 0:
        # Wrong: an adapter that is replicated has to be the same everywhere.
        torch.manual_seed(mesh.get_local_rank())
        model.adapter.reset_parameters()


BUG = KnownBug(
    title="each tp rank draws its own copy of what is replicated",
    reports=("NVIDIA-NeMo/Automodel#3822",),
    model=Net,
    batch=make_batch,
    mesh="tp2",
    right=Program(columns_and_rows),
    wrong=Program(draws_adapters),
    first="adapter.weight",
    says="adapter.weight on rank 1: differs",
    rank=1,
)
