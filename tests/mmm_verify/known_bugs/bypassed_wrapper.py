"""The loss is computed by the model inside DDP, not by DDP.

DDP prepares its all-reduce in its own forward. A loss that calls `ddp.module`, or a part of it, leaves that out: every
rank trains on the gradients of its own samples. Nothing raises, and the loss falls on every rank, since each has a
model that learns. The right program calls the wrapper.

huggingface/trl#7245: DPO and KTO with a fused loss ran the unwrapped model under DDP.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.known_bugs import KnownBug, Program


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def parallelize(model, mesh):
    return DistributedDataParallel(model)


def calls_the_wrapper(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def calls_the_model_inside(model, batch):
    inputs, targets = batch
    # Wrong: DDP's own forward prepares the sum of gradients.
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    return F.mse_loss(inside(inputs), targets)


BUG = KnownBug(
    title="the loss goes past DDP's wrapper",
    reports=("huggingface/trl#7245", "huggingface/trl#5282"),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(parallelize, calls_the_wrapper),
    wrong=Program(parallelize, calls_the_model_inside),
    first="every gradient",
    says="missing all-reduce over dp",
)
