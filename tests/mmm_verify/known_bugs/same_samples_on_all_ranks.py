"""Every rank reads the same samples, because the data loader does not know its rank.

N ranks then compute the same gradient N times, and the rest of the data is never seen. All ranks agree, and the loss
falls as on one device. The right program gives each rank its own part.

openspeech-team/openspeech#149: the samplers gave all accelerators the same examples.
"""

import torch
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program, own_part


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


def own_samples(batch, mesh):
    return [own_part(tensor, mesh, 0) for tensor in batch]


def samples_of_the_first_rank(batch, mesh):
    # Wrong: each rank has to take its own part.
    return [tensor.chunk(mesh.size())[0] for tensor in batch]


BUG = KnownBug(
    title="all ranks read the same samples",
    reports=("openspeech-team/openspeech#149",),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged, local_batch=own_samples),
    wrong=Program(averaged, local_batch=samples_of_the_first_rank),
    first="the batch",
    says="sample 4 and 3 more are on no rank",
)
