"""A tied weight's gradients are added up over stages after only some ranks have averaged them.

A sharded optimizer reduces a gradient to the rank that owns it. The embedding on the first stage and its copy on the
last lie at different places of the buffer, so different ranks own them. A sum over the two stages afterwards adds what
one rank has averaged to what another has not. The right program first adds up over stages, then averages.

NVIDIA/Megatron-LM#844: distributed optimizer and shared embedding.
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
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        # (batch, positions) → (batch, positions, 11)
        return self.head(torch.tanh(self.embedding(tokens)))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def stages(model, mesh):
    """The first stage keeps the embedding, the second the head."""
    if mesh["pp"].get_local_rank() == 0:
        model.head = None
    else:
        model.embedding = None


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def backward(model, batch, mesh):
    """Run one micro-batch. Returns the shared weight and, on the last stage, the loss."""
    tokens, labels = batch
    peers = dist.get_process_group_ranks(mesh["pp"].get_group())
    if mesh["pp"].get_local_rank() == 0:
        hidden = torch.tanh(model.embedding(tokens))
        dist.send(hidden.detach(), peers[1])
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, peers[1])
        hidden.backward(gradient)
        return model.embedding.weight, None
    hidden = torch.empty(*tokens.shape, 8, dtype=model.head.weight.dtype)
    dist.recv(hidden, peers[0])
    hidden.requires_grad_()
    loss = loss_of(model.head(hidden), labels)
    loss.backward()
    dist.send(hidden.grad, peers[0])
    return model.head.weight, loss.detach()


def right_step(model, batch, mesh):
    if mesh is None:
        return loss_of(model(batch[0]), batch[1])
    shared, loss = backward(model, batch, mesh)
    dist.all_reduce(shared.grad, group=mesh["pp"].get_group())
    dist.all_reduce(shared.grad.div_(mesh["dp"].size()), group=mesh["dp"].get_group())
    return loss


def wrong_step(model, batch, mesh):
    if mesh is None:
        return loss_of(model(batch[0]), batch[1])
    shared, loss = backward(model, batch, mesh)
    mean = shared.grad / mesh["dp"].size()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    # The first dp rank owns the first stage's copy, the second that of the last stage.
    if mesh["dp"].get_local_rank() == mesh["pp"].get_local_rank():
        shared.grad = mean
    dist.all_reduce(shared.grad, group=mesh["pp"].get_group())
    return loss


BUG = KnownBug(
    title="a tied weight is added up over stages after only its owner has averaged it",
    reports=("NVIDIA/Megatron-LM#844",),
    model=Tied,
    batch=make_batch,
    mesh="dp2,pp2",
    right=Program(stages, right_step),
    wrong=Program(stages, wrong_step),
    first="every gradient",
    says="head.weight on rank",
)
