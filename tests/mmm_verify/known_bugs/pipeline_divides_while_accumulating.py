"""Gradients of several pipeline steps are accumulated, and each step divides all that is there so far.

A schedule that divides gradients by the number of its micro-batches divides, in the second step, those of the first
once more. The oldest weigh least, so the sum becomes a decaying mean. The loss is right. The right program divides the
loss, and turns the schedule's division off.

pytorch/torchtitan#1733: gradient accumulation was broken under pipelines.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from support.known_bugs import KnownBug, Program

MICROBATCHES = 2
ACCUMULATED = 2


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 4)


def mean_over_the_steps(output, targets):
    return F.mse_loss(output, targets) / ACCUMULATED


def mean_over_all(output, targets):
    return F.mse_loss(output, targets) / (ACCUMULATED * MICROBATCHES)


def stages(model, mesh, loss_fn, scale_grads):
    rank = mesh.get_local_rank()
    # The first rank has the first linear map and the tanh, the second the last linear map.
    for index in (2,) if rank == 0 else (0, 1):
        model[index] = nn.Identity()
    stage = PipelineStage(model, rank, mesh.size(), torch.device("cpu"), group=mesh.get_group())
    return model, ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=scale_grads)


def loss_divided(model, mesh):
    return stages(model, mesh, mean_over_all, scale_grads=False)


def gradients_divided(model, mesh):
    # Wrong: gradients of earlier steps are divided once more each time.
    return stages(model, mesh, mean_over_the_steps, scale_grads=True)


def accumulate(program, batch, mesh, shown):
    inputs, targets = batch
    if mesh is None:
        return F.mse_loss(program(inputs), targets)
    _, schedule = program
    losses = []
    for own_inputs, own_targets in zip(inputs.chunk(ACCUMULATED), targets.chunk(ACCUMULATED), strict=True):
        if mesh.get_local_rank() == 0:
            schedule.step(own_inputs)
        else:
            of_step = []
            schedule.step(target=own_targets, losses=of_step)
            losses += of_step
    return sum(losses).detach() * shown if losses else None


def right_step(program, batch, mesh):
    return accumulate(program, batch, mesh, shown=1)


def wrong_step(program, batch, mesh):
    return accumulate(program, batch, mesh, shown=1 / MICROBATCHES)


BUG = KnownBug(
    title="accumulated gradients are divided again in every pipeline step",
    reports=("pytorch/torchtitan#1733",),
    model=make_model,
    batch=make_batch,
    mesh="pp2",
    right=Program(loss_divided, right_step),
    wrong=Program(gradients_divided, wrong_step),
    first="every gradient",
    says="2.weight on rank 1: differs",
)
