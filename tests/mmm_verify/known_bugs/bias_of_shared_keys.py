"""All heads share keys and values, and only the weights of that matrix are synchronized over tp.

With multi-query attention each rank has the one matrix for keys and values, and its own queries: the gradient of that
matrix is a part of a sum. Someone adds it up for the weight and forgets the bias. Training gets unstable after
thousands of steps. The right program adds up both.

bigcode-project/Megatron-LM#35, mended in bigcode-project/Megatron-LM#12.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part

HEAD_DIM = 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 2 * HEAD_DIM)
        self.key_value = nn.Linear(6, 2 * HEAD_DIM)
        self.out = nn.Linear(2 * HEAD_DIM, 6, bias=False)
        self.group = None

    def forward(self, x):
        # (batch, positions, 6), in and out
        if self.group is not None:
            x = copy(x, self.group)
        q = self.query(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        # One head, for all queries: (batch, 1, positions, head_dim)
        k, v = (projected[:, None].expand_as(q) for projected in self.key_value(x).chunk(2, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = self.out(heads.transpose(1, 2).flatten(-2))
        return output if self.group is None else reduce(output, self.group)


def make_batch():
    return torch.randn(4, 5, 6), torch.randn(4, 5, 6)


def shard_queries(model, mesh, added_up):
    model.group = mesh.get_group()
    model.query.weight = nn.Parameter(own_part(model.query.weight.detach(), mesh, 0).clone())
    model.query.bias = nn.Parameter(own_part(model.query.bias.detach(), mesh, 0).clone())
    model.out.weight = nn.Parameter(own_part(model.out.weight.detach(), mesh, 1).clone())
    for parameter in added_up:
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


def weight_and_bias(model, mesh):
    shard_queries(model, mesh, [model.key_value.weight, model.key_value.bias])


def only_the_weight(model, mesh):
    # Wrong: the bias gets a part of its gradient on each rank too.
    shard_queries(model, mesh, [model.key_value.weight])


BUG = KnownBug(
    title="the gradient of a bias that all heads share is not added up over tp",
    reports=("bigcode-project/Megatron-LM#35", "bigcode-project/Megatron-LM#12"),
    model=Attention,
    batch=make_batch,
    mesh="tp2",
    right=Program(weight_and_bias),
    wrong=Program(only_the_weight),
    first="gradient of key_value.bias",
    says="key_value.bias on rank 0: partial over tp",
)
