"""The loss that is shown is too small by the number of context-parallel ranks; the gradients are right.

Each rank has its own positions, and shows its part of a sum. What prints it takes the mean over ranks, or returns early
because a tensor says that it is reduced already. People compare such curves, and conclude that one layout learns
better. The right program adds up the parts.

pytorch/torchtitan#3329: with tp and cp, the displayed loss was half of the right one.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up
from support.known_bugs import KnownBug, Program, own_part


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def show(model, batch, mesh, divisor):
    tokens, labels = batch
    count = labels.numel()
    if mesh is not None:
        tokens, labels = own_part(tokens, mesh, 1), own_part(labels, mesh, 1)
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
    if mesh is None:
        return loss
    loss.backward()
    shown = loss.detach()
    dist.all_reduce(shown)
    return shown / divisor(mesh)


def right_step(model, batch, mesh):
    return show(model, batch, mesh, divisor=lambda mesh: 1)


def wrong_step(model, batch, mesh):
    # Wrong: each part is divided by all tokens already.
    return show(model, batch, mesh, divisor=lambda mesh: mesh.size())


BUG = KnownBug(
    title="the displayed loss is the mean of parts that have to be added up",
    reports=("pytorch/torchtitan#3329", "pytorch/torchtitan#3313"),
    model=make_model,
    batch=make_batch,
    mesh="cp2",
    right=Program(add_up, right_step),
    wrong=Program(add_up, wrong_step),
    first="the loss",
    says=r"the loss: is .* on every rank: 1/2 times \(one over the size of cp\)",
)
