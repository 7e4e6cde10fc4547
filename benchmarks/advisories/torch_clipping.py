"""clip_grad_norm_ of gradients that are partial sums, as under SequenceParallel, and of sharded ones."""

import torch.nn.functional as F
from torch import nn, randn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

LARGEST_NORM = 0.05


def make_model():
    # in, norm, up, tanh, down
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def make_batch():
    # (samples, positions, channels)
    return randn(4, 6, 8), randn(4, 6, 8)


def parallelize(model, mesh):
    """Ranks have parts of the positions around the norm, and parts of the channels in the middle."""
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "1": SequenceParallel(use_local_output=False),
        "2": ColwiseParallel(input_layouts=Shard(1)),
        "4": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def shard(model, mesh):
    fully_shard(model, mesh=mesh)


def unclipped(model, batch, scale=1.0):
    """The control."""
    loss = scale * F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def by_default(model, batch):
    loss = unclipped(model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    return loss


def tiny(model, batch):
    """Gradients as small as what clip_grad_norm_ adds to their norm."""
    loss = unclipped(model, batch, 1e-6)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6 * LARGEST_NORM)
    return loss
