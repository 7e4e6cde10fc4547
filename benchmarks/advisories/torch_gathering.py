"""Weights that FSDP and tensor parallelism shard along one dim are gathered by full_tensor(), as for a checkpoint."""

import copy

from torch import nn, randn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def uneven():
    # 6 rows over 2 x 2 ranks
    return nn.Sequential(nn.Linear(5, 6))


def even():
    """The control."""
    return nn.Sequential(nn.Linear(5, 8))


def make_batch():
    return randn(8, 5)


def step(model, batch):
    return model(batch).square().mean()


def parallelize(model, mesh):
    """Load what was gathered into a model with replicas."""
    sharded = copy.deepcopy(model)
    parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(sharded, mesh=mesh["dp"])
    gathered = {name: parameter.full_tensor() for name, parameter in sharded.named_parameters()}
    model.load_state_dict(gathered)
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
