"""Each rank shuffles the data with a seed of its own, and takes its slice of its own order.

Slices of one shuffled order are disjoint; slices of different orders are not. Some samples are read twice, others
never. No rank can notice. The right program shuffles with one seed.

NVlabs/LongLive#71: the sampler's seed was the time, times the rank.
"""

import torch
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program, own_part


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def shuffled(batch, mesh, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch[0]), generator=generator)
    own = own_part(order, mesh, 0)
    return [tensor[own] for tensor in batch]


def by_one_seed(batch, mesh):
    return shuffled(batch, mesh, seed=1)


def by_own_seed(batch, mesh):
    # Wrong: parts of different orders overlap, and leave samples out.
    return shuffled(batch, mesh, seed=mesh.get_local_rank())


BUG = KnownBug(
    title="each rank shuffles the data in an order of its own",
    reports=("NVlabs/LongLive#71",),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged, local_batch=by_one_seed),
    wrong=Program(averaged, local_batch=by_own_seed),
    first="the batch",
    says="are on no rank",
)
