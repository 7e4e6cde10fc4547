"""Context-parallel attention drops the gradient that a rank's keys and values have from other ranks' queries.

Each rank has the queries of its positions, and gets all keys and values. In the backward a key's gradient comes from
the queries of all ranks, so it has to be sent back and added up; a backward that only keeps the rank's own part is
wrong for keys and values, and for all that comes before. The loss is right. The right program adds up.

NVIDIA/Megatron-LM#1464: wrong gradients of attention with context parallelism.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up, gather, gather_summed
from support.known_bugs import KnownBug, Program, own_part


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 4, bias=False) for _ in range(3))
        self.out = nn.Linear(4, 6, bias=False)
        self.mesh, self.join = None, None

    def forward(self, x):
        # (batch, own positions, 6), in and out
        q, k, v = self.query(x), self.key(x), self.value(x)
        length = x.shape[1]
        first = 0
        if self.mesh is not None:
            k, v = self.join(k, self.mesh.get_group()), self.join(v, self.mesh.get_group())
            first = self.mesh.get_local_rank() * length
        # A query at position i sees keys up to i: (own positions, all positions)
        visible = torch.ones(length, k.shape[1]).tril(first).bool()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=visible))


def make_batch():
    return torch.randn(4, 6, 6), torch.randn(4, 6, 6)


def all_keys(tensor, group):
    return gather_summed(tensor, group, dim=1)


def all_keys_own_gradient(tensor, group):
    # `gather` joins along the last dim, and its backward keeps the rank's own part.
    return gather(tensor.transpose(1, 2), group).transpose(1, 2)


def parallelize(model, mesh):
    model.mesh, model.join = mesh, all_keys
    add_up(model, mesh)


def drops_what_others_have(model, mesh):
    parallelize(model, mesh)
    # Wrong: other ranks' queries look at these keys too.
    model.join = all_keys_own_gradient


def step(model, batch, mesh):
    inputs, targets = batch
    count = targets.numel()
    if mesh is not None:
        inputs, targets = own_part(inputs, mesh, 1), own_part(targets, mesh, 1)
    return F.mse_loss(model(inputs), targets, reduction="sum") / count


BUG = KnownBug(
    title="keys lack the gradient from other context-parallel ranks' queries",
    reports=("NVIDIA/Megatron-LM#1464",),
    model=Attention,
    batch=make_batch,
    mesh="cp2",
    right=Program(parallelize, step),
    wrong=Program(drops_what_others_have, step),
    first="gradient of value.weight",
    says="value.weight on rank 0: differs",
)
