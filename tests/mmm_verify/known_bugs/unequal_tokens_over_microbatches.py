"""Each micro-batch takes the mean over its own labels, and the micro-batches' means are averaged.

With samples of different lengths the result depends on how samples are grouped, and labels of short micro-batches
weigh more. The loss is near the right one. The right program divides by the number of labels of the whole step.

huggingface/transformers#24725 and huggingface/transformers#34191.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.known_bugs import KnownBug, Program

IGNORED = -100
MICROBATCHES = 2


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    tokens = torch.randint(11, (4, 6))
    labels = torch.randint(11, (4, 6))
    # On each of two ranks, the first micro-batch has few labels.
    labels[0::2, 2:] = IGNORED
    return tokens, labels


def parallelize(model, mesh):
    """Nothing is changed: the step synchronizes."""


def accumulate(model, batch, mesh, of_the_step):
    tokens, labels = batch
    count = (labels != IGNORED).sum()
    if mesh is None:
        microbatches = [batch]
    else:
        dist.all_reduce(count)
        microbatches = list(zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True))
    total = 0.0
    for own_tokens, own_labels in microbatches:
        logits = model(own_tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, own_labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if of_the_step or mesh is None:
            loss = loss / count
        else:
            loss = loss / (own_labels != IGNORED).sum() / MICROBATCHES / mesh.size()
        loss.backward()
        total += loss.detach()
    if mesh is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    return total


def right_step(model, batch, mesh):
    return accumulate(model, batch, mesh, of_the_step=True)


def wrong_step(model, batch, mesh):
    # Wrong: micro-batches have different numbers of labels.
    return accumulate(model, batch, mesh, of_the_step=False)


BUG = KnownBug(
    title="the loss is the mean of the micro-batches' means, with unequal numbers of labels",
    reports=("huggingface/transformers#24725", "huggingface/transformers#34191"),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="the loss",
    says="the loss: ",
)
