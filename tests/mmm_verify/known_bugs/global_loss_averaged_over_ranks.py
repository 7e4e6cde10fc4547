"""Every rank computes the loss of all samples, and the gradients are averaged as if each had that of its own.

All ranks gather all features and compute the same loss. A rank's gradient then covers only its own features: the
ranks' gradients have to be added up, but DDP takes their mean. The loss is right on every rank; the gradients are N
times too small, which an adaptive optimizer nearly hides. The right program multiplies by the number of ranks, or
gathers with a backward that adds up.

huggingface/accelerate#1154: with InfoNCE, averaged gradients are not those of a larger batch.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import averaged, gather, gather_summed
from support.known_bugs import KnownBug, Program


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make_batch():
    return torch.randn(8, 2, 6)


def info_nce(features):
    # (samples, views, 4)
    first, second = features.unbind(1)
    return F.cross_entropy(first @ second.T, torch.arange(len(features)))


def adds_up_in_backward(model, batch, mesh):
    features = model(batch)
    if mesh is not None:
        features = gather_summed(features, mesh.get_group())
    return info_nce(features)


def keeps_its_own_part_in_backward(model, batch, mesh):
    features = model(batch)
    if mesh is not None:
        # `gather` joins along the last dim.
        features = gather(features.movedim(0, -1), mesh.get_group()).movedim(-1, 0)
    return info_nce(features)


BUG = KnownBug(
    title="every rank has the loss of all samples, and gradients are averaged",
    reports=("huggingface/accelerate#1154", "mlfoundations/open_clip#616"),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged, adds_up_in_backward),
    wrong=Program(averaged, keeps_its_own_part_in_backward),
    first="every gradient",
    says=r"1/2 times \(one over the size of dp\)",
)
