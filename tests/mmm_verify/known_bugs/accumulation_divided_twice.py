"""The loss of a micro-batch is divided by the number of micro-batches twice.

The loss already is a sum over its own labels, divided by the labels of the whole step. A trainer around it then divides
by the number of micro-batches once more, as it has to for losses that are means. The learning rate is too small by
that factor. The right program divides once.

modelscope/ms-swift#10117, and huggingface/trl#6024 for another wrong count of tokens.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.known_bugs import KnownBug, Program

MICROBATCHES = 4


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    return torch.randint(11, (8, 6)), torch.randint(11, (8, 6))


def parallelize(model, mesh):
    """Nothing is changed: the step synchronizes."""


def accumulate(model, batch, mesh, again):
    count = torch.tensor(batch[1].numel())
    if mesh is not None:
        dist.all_reduce(count)
    total = 0.0
    for tokens, labels in zip(batch[0].chunk(MICROBATCHES), batch[1].chunk(MICROBATCHES), strict=True):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count
        total += loss.detach()
        (loss / again).backward()
    if mesh is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    return total


def right_step(model, batch, mesh):
    return accumulate(model, batch, mesh, again=1)


def wrong_step(model, batch, mesh):
    # Wrong: the loss of each micro-batch is divided already.
    return accumulate(model, batch, mesh, again=1 if mesh is None else MICROBATCHES)


BUG = KnownBug(
    title="the loss is divided by the number of micro-batches twice",
    reports=("modelscope/ms-swift#10117", "huggingface/trl#6024"),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="every gradient",
    says="0.25 times",
)
