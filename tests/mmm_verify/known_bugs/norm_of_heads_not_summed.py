"""All heads share a norm, and the tensor-parallel ranks have different heads.

Each rank's gradient of the shared weight comes from its own heads: it is a part of a sum that nobody takes. Frameworks
add such gradients up under sequence parallelism only. The ranks' copies drift apart, and only rank 0's is saved. The
right program adds them up whenever heads are sharded.

NVIDIA/Megatron-LM#7452, finding 11: the output norm of a gated delta net.
"""

import torch
import torch.distributed as dist
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part

HEAD_DIM = 4


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 2 * HEAD_DIM, bias=False)
        self.norm = nn.RMSNorm(HEAD_DIM)
        self.down = nn.Linear(2 * HEAD_DIM, 6, bias=False)
        self.group = None

    def forward(self, x):
        # (batch, 6), in and out
        if self.group is not None:
            x = copy(x, self.group)
        heads = self.up(x).unflatten(-1, (-1, HEAD_DIM))
        output = self.down(self.norm(heads).flatten(-2))
        return output if self.group is None else reduce(output, self.group)


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 6)


def shard_heads(model, mesh):
    model.group = mesh.get_group()
    model.up.weight = nn.Parameter(own_part(model.up.weight.detach(), mesh, 0).clone())
    model.down.weight = nn.Parameter(own_part(model.down.weight.detach(), mesh, 1).clone())


def adds_up(model, mesh):
    shard_heads(model, mesh)
    model.norm.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))


BUG = KnownBug(
    title="the gradient of a norm that all heads share is not added up over tp",
    reports=("NVIDIA/Megatron-LM#7452",),
    model=Heads,
    batch=make_batch,
    mesh="tp2",
    right=Program(adds_up),
    wrong=Program(shard_heads),
    first="gradient of norm.weight",
    says="norm.weight on rank 0: partial over tp",
)
