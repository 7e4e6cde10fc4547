"""A pipeline's schedule divides by the number of micro-batches what is divided already.

Schedules divide, because they take losses to be means. Here the loss of a micro-batch is a sum, divided by the tokens
of the whole step. The gradients come out too small by the number of micro-batches; the loss that is printed is right,
and clipping or Adam nearly hide the factor. The right program turns the schedule's division off.

areal-project/AReaL#1273: gradients were N times too small with N micro-batches.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from support.known_bugs import KnownBug, Program

MICROBATCHES = 4


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 4)


def sum_of_squares(output, targets):
    """A micro-batch's part of the mean over the batch."""
    return F.mse_loss(output, targets, reduction="sum") / (MICROBATCHES * targets.numel())


def stages(model, mesh, scale_grads):
    rank = mesh.get_local_rank()
    # The first rank has the first linear map and the tanh, the second the last linear map.
    for index in (2,) if rank == 0 else (0, 1):
        model[index] = nn.Identity()
    stage = PipelineStage(model, rank, mesh.size(), torch.device("cpu"), group=mesh.get_group())
    return model, ScheduleGPipe(stage, MICROBATCHES, loss_fn=sum_of_squares, scale_grads=scale_grads)


def without_dividing(model, mesh):
    return stages(model, mesh, scale_grads=False)


def dividing(model, mesh):
    # Wrong: the loss is a mean over all micro-batches already.
    return stages(model, mesh, scale_grads=True)


def step(program, batch, mesh):
    inputs, targets = batch
    if mesh is None:
        return F.mse_loss(program(inputs), targets)
    _, schedule = program
    if mesh.get_local_rank() == 0:
        schedule.step(inputs)
        return None
    losses = []
    schedule.step(target=targets, losses=losses)
    return sum(losses).detach()


BUG = KnownBug(
    title="a pipeline's schedule divides by the micro-batches once more",
    reports=("areal-project/AReaL#1273",),
    model=make_model,
    batch=make_batch,
    mesh="pp2",
    right=Program(without_dividing, step),
    wrong=Program(dividing, step),
    first="every gradient",
    says="0.25 times what it should be",
)
