"""Each rank takes the mean over its own labels, and the ranks' means are averaged.

If some labels are ignored, ranks have different numbers of them. In the mean of means a label of a rank with few
weighs more than one of a rank with many. The loss is off by little, and it falls. The right program divides the sum
over its own labels by the number of labels of all ranks.

pytorch/torchtitan#2206: the loss took no notice of ranks with unequal numbers of valid tokens.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up, averaged
from support.known_bugs import KnownBug, Program

IGNORED = -100


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    tokens = torch.randint(11, (4, 6))
    labels = torch.randint(11, (4, 6))
    # The first two samples, those of rank 0, have few labels.
    labels[:2, 1:] = IGNORED
    return tokens, labels


def sum_of_losses(model, batch):
    tokens, labels = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def over_all_labels(model, batch, mesh):
    count = (batch[1] != IGNORED).sum()
    if mesh is not None:
        dist.all_reduce(count)
    return sum_of_losses(model, batch) / count


def over_own_labels(model, batch, mesh):
    # Wrong: the ranks' means have different numbers of labels.
    return sum_of_losses(model, batch) / (batch[1] != IGNORED).sum()


BUG = KnownBug(
    title="the loss is the mean of the ranks' means, with unequal numbers of labels",
    reports=("pytorch/torchtitan#2206",),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(add_up, over_all_labels),
    wrong=Program(averaged, over_own_labels),
    first="the loss",
    says="the loss: is .* in the mean over dp",
)
