"""Label smoothing takes a tensor-parallel rank's part of the vocabulary for all of it.

The logits are sharded over the vocabulary. The cross-entropy itself is reduced over ranks; the mean over all words that
smoothing needs is that of the rank's own words. Every rank has another loss, near the right one. The right program
takes sum and number of words over all ranks.

NVIDIA/Megatron-LM#7452, finding 1; also NVIDIA/Megatron-LM#7464 and #737, of 2024.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import copy, reduce
from support.known_bugs import KnownBug, Program, own_part

WORDS = 12
SMOOTHING = 0.1


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, WORDS, bias=False)
        self.mesh = None

    def forward(self, x):
        # (batch, 6) → (batch, words), or this rank's words
        hidden = torch.tanh(self.body(x))
        return self.head(hidden if self.mesh is None else copy(hidden, self.mesh.get_group()))


def make_batch():
    return torch.randn(8, 6), torch.randint(WORDS, (8,))


def shard_vocabulary(model, mesh):
    model.mesh = mesh
    model.head.weight = nn.Parameter(own_part(model.head.weight.detach(), mesh, 0).clone())


def smoothed(logits, labels, mesh, of_all_words):
    """Cross-entropy with label smoothing of logits that are sharded over the vocabulary."""
    group = mesh.get_group()
    log_normalizer = reduce(logits.exp().sum(-1), group).log()
    local = labels - mesh.get_local_rank() * logits.shape[-1]
    is_own = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    of_the_label = reduce(torch.where(is_own, picked, 0.0), group)
    if of_all_words:
        mean = reduce(logits.sum(-1), group) / WORDS
    else:
        mean = logits.mean(-1)
    return (log_normalizer - (1 - SMOOTHING) * of_the_label - SMOOTHING * mean).mean()


def loss_of(model, batch, mesh, of_all_words):
    logits = model(batch[0])
    if mesh is None:
        return F.cross_entropy(logits, batch[1], label_smoothing=SMOOTHING)
    return smoothed(logits, batch[1], mesh, of_all_words)


def right_step(model, batch, mesh):
    return loss_of(model, batch, mesh, of_all_words=True)


def wrong_step(model, batch, mesh):
    # Wrong: the mean over words is that of the rank's own.
    return loss_of(model, batch, mesh, of_all_words=False)


BUG = KnownBug(
    title="label smoothing takes a rank's part of the vocabulary for all of it",
    reports=("NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7464", "NVIDIA/Megatron-LM#737"),
    model=Head,
    batch=make_batch,
    mesh="tp2",
    right=Program(shard_vocabulary, right_step),
    wrong=Program(shard_vocabulary, wrong_step),
    first="the loss",
    says="the ranks of tp have different losses",
)
