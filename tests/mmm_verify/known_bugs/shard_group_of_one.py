"""FSDP gets a group of one rank to shard over, so it has nobody to synchronize with.

A setting such as "shard over 1" makes a mesh of N replicas times 1 shard. An FSDP that only looks at the size of the
shard group synchronizes nothing, and the N replicas train apart. The losses look like those of any run. The right
program shards over all data-parallel ranks.

verl-project/verl#7493: `fsdp_size=1` on several GPUs disabled the synchronization of gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from support.known_bugs import KnownBug, Program


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def over_all_ranks(model, mesh):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), process_group=mesh.get_group())


def over_one_rank(model, mesh):
    # Every rank takes part in making every group.
    groups = [dist.new_group([rank]) for rank in range(mesh.size())]
    own = groups[mesh.get_local_rank()]
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), process_group=own, sharding_strategy=ShardingStrategy.NO_SHARD
    )


BUG = KnownBug(
    title="FSDP shards over a group of one rank",
    reports=("verl-project/verl#7493",),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(over_all_ranks),
    wrong=Program(over_one_rank),
    first="every gradient",
    says="missing all-reduce over dp",
)
