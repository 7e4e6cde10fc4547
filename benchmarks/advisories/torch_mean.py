"""The mean over ranks that fully_shard takes of gradients, on CPUs."""

import torch.nn.functional as F
from torch import nn, randint, randn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_batch():
    return randn(8, 8), randint(4, (8,))


def step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)


def control(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group())
