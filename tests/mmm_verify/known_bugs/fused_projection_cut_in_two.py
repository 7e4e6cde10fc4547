"""A fused matrix of queries, keys and values is cut into equal parts, as if it were one.

Its rows are all queries, then all keys, then all values. The first of two ranks gets the queries and half of the keys,
and takes these for its queries, keys and values. All shapes fit. The right program cuts each of the three.

NVIDIA-NeMo/Automodel#1324: combined projections under ColwiseParallel.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part

HEAD_DIM = 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 3 * 2 * HEAD_DIM, bias=False)
        self.out = nn.Linear(2 * HEAD_DIM, 8, bias=False)
        self.group = None

    def forward(self, x):
        # (batch, positions, 8), in and out
        if self.group is not None:
            x = copy(x, self.group)
        # (batch, positions, 3, heads, head_dim) → three of (batch, heads, positions, head_dim)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = self.out(heads.transpose(1, 2).flatten(-2))
        return output if self.group is None else reduce(output, self.group)


def make_batch():
    return torch.randn(4, 5, 8), torch.randn(4, 5, 8)


def shard(model, mesh, rows):
    model.group = mesh.get_group()
    model.qkv.weight = nn.Parameter(rows.clone())
    model.out.weight = nn.Parameter(own_part(model.out.weight.detach(), mesh, 1).clone())


def cuts_each_of_three(model, mesh):
    parts = model.qkv.weight.detach().chunk(3)
    shard(model, mesh, torch.cat([own_part(projection, mesh, 0) for projection in parts]))


def cuts_once(model, mesh):
    # Wrong: rank 0 gets all queries and half of the keys.
    shard(model, mesh, own_part(model.qkv.weight.detach(), mesh, 0))


BUG = KnownBug(
    title="a fused matrix of queries, keys and values is cut as one",
    reports=("NVIDIA-NeMo/Automodel#1324",),
    model=Attention,
    batch=make_batch,
    mesh="tp2",
    right=Program(cuts_each_of_three),
    wrong=Program(cuts_once),
    first="output of out on rank 0",
    says="the loss: is .* on every rank",
    # In the rows of qkv, which are a part of the right ones.
    is_origin=False,
)
