"""Context-parallel ranks take the mean over the labels of their own positions.

A prompt has no labels, and it lies at the beginning: the first rank has few labels, the last many. A mean of the
ranks' means gives the first rank's labels too much weight; a rank without any divides by zero or drops them. The right
program divides by the number of labels of the whole sequence.

NVIDIA/Megatron-LM#7498: the loss of multi-token prediction across context-parallel ranks.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up, averaged
from support.known_bugs import KnownBug, Program, own_part

IGNORED = -100


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    tokens = torch.randint(11, (4, 6))
    labels = torch.randint(11, (4, 6))
    # A prompt of two tokens.
    labels[:, :2] = IGNORED
    return tokens, labels


def loss_of(model, batch, mesh, counts_all):
    tokens, labels = batch
    count = (labels != IGNORED).sum()
    if mesh is not None:
        tokens, labels = own_part(tokens, mesh, 1), own_part(labels, mesh, 1)
    if not counts_all:
        count = (labels != IGNORED).sum()
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / count


def right_step(model, batch, mesh):
    return loss_of(model, batch, mesh, counts_all=True)


def wrong_step(model, batch, mesh):
    # Wrong: ranks have different numbers of labels.
    return loss_of(model, batch, mesh, counts_all=mesh is None)


BUG = KnownBug(
    title="each context-parallel rank divides by the number of its own labels",
    reports=("NVIDIA/Megatron-LM#7498",),
    model=make_model,
    batch=make_batch,
    mesh="cp2",
    right=Program(add_up, right_step),
    wrong=Program(averaged, wrong_step),
    first="the loss",
    says="the loss: ",
)
