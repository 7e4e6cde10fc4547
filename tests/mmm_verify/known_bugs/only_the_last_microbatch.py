"""Of all micro-batches only the last one trains the model, because the gradients before it are thrown away.

Something between two micro-batches clears the gradients: a buffer that is reset at each reduction, or pipeline stages
that are initialized anew. The loss is added up elsewhere, so it is right in every step; only the norm of the gradients
is too small. The right program clears gradients once a step.

NVIDIA-NeMo/Automodel#3530 (pipeline stages) and NVIDIA/Megatron-LM#7186 (hybrid sharding).
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.known_bugs import KnownBug, Program

MICROBATCHES = 2


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def synchronize(model, mesh):
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad.div_(mesh.size()))


def accumulate(model, batch, mesh, clears):
    total = 0.0
    for inputs, targets in zip(batch[0].chunk(MICROBATCHES), batch[1].chunk(MICROBATCHES), strict=True):
        if clears and mesh is not None:
            model.zero_grad()
        loss = F.mse_loss(model(inputs), targets) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    if mesh is not None:
        synchronize(model, mesh)
    return total


def right_step(model, batch, mesh):
    return accumulate(model, batch, mesh, clears=False)


def wrong_step(model, batch, mesh):
    # Wrong: what earlier micro-batches have added is lost.
    return accumulate(model, batch, mesh, clears=True)


def parallelize(model, mesh):
    """Nothing is changed: the step synchronizes."""


BUG = KnownBug(
    title="gradients are cleared between micro-batches",
    reports=("NVIDIA-NeMo/Automodel#3530", "NVIDIA/Megatron-LM#7186"),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="every gradient",
    says="differs",
)
