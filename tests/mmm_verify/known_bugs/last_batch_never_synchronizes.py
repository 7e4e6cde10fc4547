"""While gradients are accumulated, no micro-batch is the last one, so none synchronizes.

DDP all-reduces in the backward of the last micro-batch only; those before are in `no_sync`. If "last" is computed from
a wrong count, such as that of the whole epoch or of another pipeline stage, it never comes. Each rank keeps the sum of
its own gradients, and all goes on as before. The right program counts the micro-batches of this step.

huggingface/picotron#5: with 1F1B one rank never synchronized its gradients.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.known_bugs import KnownBug, Program

MICROBATCHES = 2


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def parallelize(model, mesh):
    return DistributedDataParallel(model)


def accumulate(model, batch, last):
    total = 0.0
    inputs = batch[0].chunk(MICROBATCHES)
    targets = batch[1].chunk(MICROBATCHES)
    for index in range(MICROBATCHES):
        synchronizes = index == last or not isinstance(model, DistributedDataParallel)
        with contextlib.nullcontext() if synchronizes else model.no_sync():
            loss = F.mse_loss(model(inputs[index]), targets[index]) / MICROBATCHES
            loss.backward()
        total += loss.detach()
    return total


def right_step(model, batch):
    return accumulate(model, batch, last=MICROBATCHES - 1)


def wrong_step(model, batch):
    # Wrong: the last one has the number MICROBATCHES - 1.
    return accumulate(model, batch, last=MICROBATCHES)


BUG = KnownBug(
    title="no micro-batch counts as the last, so none synchronizes",
    reports=("huggingface/picotron#5",),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="every gradient",
    says="missing all-reduce over dp",
)
