"""Sequence-parallel ranks count their positions from the beginning.

Each rank has a part of the sequence, and makes positions for as many tokens as it sees: all parts get the positions of
the first. Attention that only looks at distances within a part does not mind, and the model learns something. The
right program starts at the number of tokens on the ranks before.

vllm-project/speculators#871: positions of the local length, remarked in the review of sequence parallelism.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up
from support.known_bugs import KnownBug, Program, own_part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 11)
        self.first = 0

    def forward(self, tokens):
        # (batch, own positions) → (batch, own positions, 11)
        positions = self.first + torch.arange(tokens.shape[1])
        return self.head(torch.tanh(self.word(tokens) + self.position(positions)))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def counts_the_ranks_before(model, mesh):
    model.first = mesh.get_local_rank() * 6 // mesh.size()
    add_up(model, mesh)


def step(model, batch, mesh):
    tokens, labels = batch
    count = labels.numel()
    if mesh is not None:
        tokens, labels = own_part(tokens, mesh, 1), own_part(labels, mesh, 1)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count


BUG = KnownBug(
    title="sequence-parallel ranks count their positions from 0",
    reports=("vllm-project/speculators#871",),
    model=Net,
    batch=make_batch,
    mesh="sp2",
    right=Program(counts_the_ranks_before, step),
    wrong=Program(add_up, step),
    first="output of position on rank",
    says="the loss: ",
)
