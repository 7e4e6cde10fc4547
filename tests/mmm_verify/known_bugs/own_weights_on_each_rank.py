"""Each rank draws its initial weights from a seed of its own, and nothing makes them equal.

DDP broadcasts weights when it is made; FSDP and loops by hand do not. Averaged gradients of different models train
none of them, yet the loss still falls for a while. The right program draws the same weights on every rank.

pytorch/torchtitan#166, and allenai/OLMo-core#319 for the replicas of hybrid sharding.
"""

import torch
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def drawn_by_each_rank(model, mesh):
    rank = mesh.get_local_rank()
    if rank > 0:
        # Wrong: every rank has to draw the same.
        torch.manual_seed(rank)
        model[0].reset_parameters()
        model[2].reset_parameters()
    averaged(model, mesh)


BUG = KnownBug(
    title="each rank draws weights of its own",
    reports=("pytorch/torchtitan#166", "allenai/OLMo-core#319"),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged),
    wrong=Program(drawn_by_each_rank),
    first="0.weight",
    says="0.weight on rank 1: differs",
    rank=1,
)
