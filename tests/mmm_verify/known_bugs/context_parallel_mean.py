"""Gradients of parts of a sequence are averaged, though each rank's loss is a summand.

With context parallelism each rank has some positions, and divides the sum of its losses by the number of all tokens.
The ranks' gradients have to be added up. Where the group for data and context parallelism together takes the mean,
they are too small by the size of cp. The loss is right. The right program multiplies by it, or adds up.

NVIDIA/Megatron-LM#906, NVIDIA/Megatron-LM#673 and, the second of its two bugs, verl-project/verl#4250.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up, averaged
from support.known_bugs import KnownBug, Program, own_part


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def step(model, batch, mesh):
    tokens, labels = batch
    count = labels.numel()
    if mesh is not None:
        tokens, labels = own_part(tokens, mesh, 1), own_part(labels, mesh, 1)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count


BUG = KnownBug(
    title="context parallelism averages gradients that it has to add up",
    reports=("NVIDIA/Megatron-LM#906", "NVIDIA/Megatron-LM#673", "verl-project/verl#4250"),
    model=make_model,
    batch=make_batch,
    mesh="cp2",
    right=Program(add_up, step),
    wrong=Program(averaged, step),
    first="every gradient",
    says=r"1/2 times \(one over the size of cp\) what it should be",
)
