"""Sequence parallelism shares a router over positions, and its gradient is not added up.

All tensor-parallel ranks have the same router, but each sees a part of the positions. Norms are marked for the sum
over ranks; the router was forgotten. The ranks' routers drift apart, and send the same token to different experts. The
right program adds up the gradients of all that works on parts of the sequence.

NVIDIA/Megatron-LM#619, about its #599.
"""

import torch
import torch.distributed as dist
from torch import nn

from support.by_hand import gather
from support.known_bugs import KnownBug, Program, own_part


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.mesh = None

    def forward(self, x):
        # (batch, positions, 6), in and out
        if self.mesh is not None:
            x = own_part(x, self.mesh, 1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        mixed = (outputs * self.router(x).softmax(-1)[..., None, :]).sum(-1)
        if self.mesh is None:
            return mixed
        # `gather` joins along the last dim.
        return gather(mixed.transpose(1, 2), self.mesh.get_group()).transpose(1, 2)


def make_batch():
    return torch.randn(4, 6, 6), torch.randn(4, 6, 6)


def add_up(module):
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


def experts_and_router(model, mesh):
    model.mesh = mesh
    add_up(model.experts)
    add_up(model.router)


def only_experts(model, mesh):
    model.mesh = mesh
    add_up(model.experts)


BUG = KnownBug(
    title="the router's gradient is not added up under sequence parallelism",
    reports=("NVIDIA/Megatron-LM#619",),
    model=Mixture,
    batch=make_batch,
    mesh="tp2",
    right=Program(experts_and_router),
    wrong=Program(only_experts),
    first="gradient of router.weight",
    says="router.weight on rank 0: partial over tp",
)
