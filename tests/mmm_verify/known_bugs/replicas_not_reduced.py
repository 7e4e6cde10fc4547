"""Hybrid sharding shards, but never averages over the replicas.

The mesh that FSDP gets has lost its axis of replicas. Within a replica gradients are reduced, so nothing looks wrong
there; between replicas nothing is, and they drift apart. The right program passes both axes.

NVIDIA-NeMo/Automodel#3135: the mesh for mixtures of experts dropped the replicas' process group.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from support.known_bugs import KnownBug, Program


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 4)


def over_both_axes(model, mesh):
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])


def over_the_shards(model, mesh):
    # Wrong: replicas are ranks of dp_replicate, which this mesh has not.
    fully_shard(model, mesh=mesh["dp_shard"])


BUG = KnownBug(
    title="hybrid sharding never averages over the replicas",
    reports=("NVIDIA-NeMo/Automodel#3135",),
    model=make_model,
    batch=make_batch,
    mesh="dp_replicate2,dp_shard2",
    right=Program(over_both_axes),
    wrong=Program(over_the_shards),
    first="every gradient",
    says="missing all-reduce over dp_replicate",
)
