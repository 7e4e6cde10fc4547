"""Logits that every tensor-parallel rank has in full go into a loss that takes them for a part.

The head gathers its outputs, so that each rank has those of all words. The vocabulary-parallel cross-entropy adds up
exponentials over the ranks all the same, and counts each word once a rank. The loss is too large by the logarithm of
the size of tp: nobody knows what it should be. The right program hands that loss the rank's own words.

NVIDIA/Megatron-LM#7452, finding 2.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, gather, reduce
from support.known_bugs import KnownBug, Program, own_part

WORDS = 12


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, WORDS, bias=False)
        self.mesh = None
        self.gathers = False

    def forward(self, x):
        # (batch, 6) → (batch, words), or this rank's words
        hidden = torch.tanh(self.body(x))
        if self.mesh is None:
            return self.head(hidden)
        logits = self.head(copy(hidden, self.mesh.get_group()))
        return gather(logits, self.mesh.get_group()) if self.gathers else logits


def make_batch():
    return torch.randn(8, 6), torch.randint(WORDS, (8,))


def shard_vocabulary(model, mesh):
    model.mesh = mesh
    model.head.weight = nn.Parameter(own_part(model.head.weight.detach(), mesh, 0).clone())


def gathers_logits(model, mesh):
    shard_vocabulary(model, mesh)
    # Wrong: the loss takes each rank's logits for its own words.
    model.gathers = True


def step(model, batch, mesh):
    logits = model(batch[0])
    if mesh is None:
        return F.cross_entropy(logits, batch[1])
    group = mesh.get_group()
    log_normalizer = reduce(logits.exp().sum(-1), group).log()
    # The first word of this rank.
    first = mesh.get_local_rank() * WORDS // mesh.size()
    length = WORDS // mesh.size()
    local = batch[1] - first
    is_own = (local >= 0) & (local < length)
    own_logits = logits.narrow(-1, first, length) if model.gathers else logits
    picked = own_logits.gather(-1, local.clamp(0, length - 1)[:, None])[:, 0]
    return (log_normalizer - reduce(torch.where(is_own, picked, 0.0), group)).mean()


BUG = KnownBug(
    title="logits of all words go into a loss for sharded ones",
    reports=("NVIDIA/Megatron-LM#7452",),
    model=Head,
    batch=make_batch,
    mesh="tp2",
    right=Program(shard_vocabulary, step),
    wrong=Program(gathers_logits, step),
    first="the loss",
    says="the loss: is .* on every rank",
)
