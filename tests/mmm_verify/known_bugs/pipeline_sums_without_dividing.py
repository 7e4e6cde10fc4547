"""With a pipeline the loss is divided after its backward, for the log.

Without pipelines, the sum over tokens is divided by their number, then goes backward. A pipeline's schedule goes
backward itself, from the sum, and the division comes too late. The gradients are too large by the number of tokens;
the loss that is printed is right, and clipping hides the rest. The right program hands the schedule the divided loss.

pytorch/torchtitan#2972, and deepspeedai/DeepSpeed#7773 for micro-batches that are added up and not averaged.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from support.known_bugs import KnownBug, Program

MICROBATCHES = 2
TARGETS = 8 * 4


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 4)


def sum_of_squares(output, targets):
    return F.mse_loss(output, targets, reduction="sum")


def part_of_the_mean(output, targets):
    return sum_of_squares(output, targets) / TARGETS


def stages(model, mesh, loss_fn):
    rank = mesh.get_local_rank()
    # The first rank has the first linear map and the tanh, the second the last linear map.
    for index in (2,) if rank == 0 else (0, 1):
        model[index] = nn.Identity()
    stage = PipelineStage(model, rank, mesh.size(), torch.device("cpu"), group=mesh.get_group())
    return model, ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)


def divides_before(model, mesh):
    return stages(model, mesh, part_of_the_mean)


def divides_after(model, mesh):
    return stages(model, mesh, sum_of_squares)


def run(program, batch, mesh, divisor):
    inputs, targets = batch
    if mesh is None:
        return F.mse_loss(program(inputs), targets)
    _, schedule = program
    if mesh.get_local_rank() == 0:
        schedule.step(inputs)
        return None
    losses = []
    schedule.step(target=targets, losses=losses)
    return sum(losses).detach() / divisor


def right_step(program, batch, mesh):
    return run(program, batch, mesh, divisor=1)


def wrong_step(program, batch, mesh):
    # Wrong: gradients are those of the sum.
    return run(program, batch, mesh, divisor=TARGETS)


BUG = KnownBug(
    title="a pipeline divides the loss only after its backward",
    reports=("pytorch/torchtitan#2972", "deepspeedai/DeepSpeed#7773"),
    model=make_model,
    batch=make_batch,
    mesh="pp2",
    right=Program(divides_before, right_step),
    wrong=Program(divides_after, wrong_step),
    first="every gradient",
    says="32 times what it should be",
)
