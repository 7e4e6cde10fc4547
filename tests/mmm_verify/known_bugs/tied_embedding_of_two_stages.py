"""The embedding and the head share a weight, but they are on different pipeline stages.

Each stage has a copy, with the part of the gradient that comes from its own use of it. Unless the two parts are added
up, the copies go different ways, and the model is no longer the one that was meant. Stages do not look at each other's
weights, so nobody sees it. The right program adds up the two gradients before the optimizer's step.

uw-syfi/piper#13, and NVIDIA/Megatron-LM#656, where tied weights came apart under pipelines.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.known_bugs import KnownBug, Program


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def first_stage(self, tokens):
        return torch.tanh(self.body(self.embedding(tokens)))

    def forward(self, tokens):
        # (batch, positions) → (batch, positions, 11)
        return self.head(self.first_stage(tokens))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def stages(model, mesh):
    """The first rank keeps the embedding and the body, the second the head."""
    if mesh.get_local_rank() == 0:
        model.head = None
    else:
        model.embedding = model.body = None


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pipeline(model, batch, mesh, adds_up):
    tokens, labels = batch
    if mesh is None:
        return loss_of(model(tokens), labels)
    loss = None
    if mesh.get_local_rank() == 0:
        hidden = model.first_stage(tokens)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        shared = model.embedding.weight
    else:
        hidden = torch.empty(*tokens.shape, 8, dtype=model.head.weight.dtype)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = loss_of(model.head(hidden), labels)
        loss.backward()
        dist.send(hidden.grad, 0)
        shared = model.head.weight
        loss = loss.detach()
    if adds_up:
        dist.all_reduce(shared.grad)
    return loss


def right_step(model, batch, mesh):
    return pipeline(model, batch, mesh, adds_up=True)


def wrong_step(model, batch, mesh):
    # Wrong: each copy moves by its own use only.
    return pipeline(model, batch, mesh, adds_up=False)


BUG = KnownBug(
    title="a tied weight's gradients on two pipeline stages are not added up",
    reports=("uw-syfi/piper#13", "NVIDIA/Megatron-LM#656"),
    model=Tied,
    batch=make_batch,
    mesh="pp2",
    right=Program(stages, right_step),
    wrong=Program(stages, wrong_step),
    first="gradient of head.weight",
    says="head.weight on rank 1: partial over pp",
)
