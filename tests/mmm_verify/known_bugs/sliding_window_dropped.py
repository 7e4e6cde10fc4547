"""Context parallelism replaces every mask by a causal one, also that of a sliding window.

Layers with a window see the last few positions. A hook that hands attention to a context-parallel kernel drops the
mask and says "causal", so these layers see everything before. The model trains with another attention than its own.
The right program refuses, or passes the window on.

huggingface/accelerate#4177.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up, gather_summed
from support.known_bugs import KnownBug, Program, own_part

WINDOW = 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 4, bias=False) for _ in range(3))
        self.mesh = None
        self.window = WINDOW

    def forward(self, x):
        # (batch, own positions, 6) → (batch, own positions, 4)
        q, k, v = self.query(x), self.key(x), self.value(x)
        length = x.shape[1]
        first = 0
        if self.mesh is not None:
            k, v = gather_summed(k, self.mesh.get_group(), 1), gather_summed(v, self.mesh.get_group(), 1)
            first = self.mesh.get_local_rank() * length
        # How far back a key is from a query: (own positions, all positions)
        distance = torch.arange(first, first + length)[:, None] - torch.arange(k.shape[1])
        visible = (distance >= 0) & (distance < self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def make_model():
    return nn.Sequential(Attention(), nn.Linear(4, 6))


def make_batch():
    return torch.randn(4, 6, 6), torch.randn(4, 6, 6)


def parallelize(model, mesh):
    model[0].mesh = mesh
    add_up(model, mesh)


def causal(model, mesh):
    parallelize(model, mesh)
    # Wrong: every token sees all before it.
    model[0].window = 10**9


def step(model, batch, mesh):
    inputs, targets = batch
    count = targets.numel()
    if mesh is not None:
        inputs, targets = own_part(inputs, mesh, 1), own_part(targets, mesh, 1)
    return F.mse_loss(model(inputs), targets, reduction="sum") / count


BUG = KnownBug(
    title="a sliding window becomes a causal mask under context parallelism",
    reports=("huggingface/accelerate#4177",),
    model=make_model,
    batch=make_batch,
    mesh="cp2",
    right=Program(parallelize, step),
    wrong=Program(causal, step),
    first="output of 0 on rank 0",
    says="the loss",
)
