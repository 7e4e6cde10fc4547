"""Two copies of one weight have the same gradient, but different optimizers update them.

An optimizer for matrices leaves out embeddings, which it knows by an attribute. The embedding's copy on the last
pipeline stage lacks the attribute, so the other optimizer takes it. Gradients are right, and the copies still go
different ways. The right program chooses the optimizer by the weight, and not by the rank.

NVIDIA/Megatron-LM#4641: tied embeddings with Muon on one stage and Adam on another.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.known_bugs import KnownBug, Program


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        # (batch, positions) → (batch, positions, 11)
        return self.head(torch.tanh(self.embedding(tokens)))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def stages(model, mesh):
    """The first rank keeps the embedding, the second the head."""
    if mesh.get_local_rank() == 0:
        model.head = None
    else:
        model.embedding = None


def step(model, batch, mesh):
    tokens, labels = batch
    if mesh is None:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss = None
    if mesh.get_local_rank() == 0:
        hidden = torch.tanh(model.embedding(tokens))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        shared = model.embedding.weight
    else:
        hidden = torch.empty(*tokens.shape, 8, dtype=model.head.weight.dtype)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())
        loss.backward()
        dist.send(hidden.grad, 0)
        shared = model.head.weight
        loss = loss.detach()
    dist.all_reduce(shared.grad)
    return loss


adam = partial(torch.optim.Adam, lr=0.01, foreach=False)


def by_the_rank(parameters):
    """Adam, except on the last stage."""
    if dist.is_initialized() and dist.get_rank() == 1:
        # Wrong: the first stage's copy is Adam's.
        return torch.optim.SGD(parameters, lr=0.01, foreach=False)
    return adam(parameters)


BUG = KnownBug(
    title="two copies of a tied weight are updated by different optimizers",
    reports=("NVIDIA/Megatron-LM#4641",),
    model=Tied,
    batch=make_batch,
    mesh="pp2",
    right=Program(stages, step, optimizer=adam),
    wrong=Program(stages, step, optimizer=by_the_rank),
    first="head.weight",
    says="head.weight on rank 1",
    rank=1,
)
