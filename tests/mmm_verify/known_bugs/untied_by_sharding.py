"""Sharding makes two parameters of one tied weight.

The head used the embedding's weight. After each was sharded, or filled with memory of its own, they are equal but no
longer one: each gets half of its gradient, and they go different ways. The first loss is right. The right program ties
them again after sharding.

facebookresearch/lingua#75 (FSDP), and verl-project/verl#7834.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        # (batch, positions) → (batch, positions, 11)
        return self.head(torch.tanh(self.embedding(tokens)))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def materialize(model):
    """Give every parameter memory of its own, with its values."""
    for module in (model.embedding, model.head):
        module.weight = nn.Parameter(module.weight.detach().clone())


def tied_again(model, mesh):
    materialize(model)
    model.tie()
    averaged(model, mesh)


def left_untied(model, mesh):
    materialize(model)
    averaged(model, mesh)


BUG = KnownBug(
    title="sharding unties a tied weight",
    reports=("facebookresearch/lingua#75", "verl-project/verl#7834"),
    model=Tied,
    batch=make_batch,
    mesh="dp2",
    right=Program(tied_again, loss_of),
    wrong=Program(left_untied, loss_of),
    first="embedding.weight",
    says="embedding.weight on rank 0: is no longer one parameter with head.weight",
)
