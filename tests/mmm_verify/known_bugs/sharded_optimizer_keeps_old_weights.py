"""Each rank updates its own parameters, and some of them are never sent to the others.

A sharded optimizer steps a part of the parameters on each rank, and then sends them to all. A filter for that sending
leaves some out: other ranks keep the old values, and each rank trains another model. The first loss and all its
gradients are right. The right program sends every parameter from its owner.

lodestone-rock/RamTorch#13: with ZeRO 1 most parameters were not broadcast after the step.
"""

import torch
import torch.distributed as dist
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 3)


class ShardedSGD(torch.optim.SGD):
    """Parameter i is stepped by rank i modulo the number of ranks, which then sends it to the others."""

    sends_matrices = True

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        # Parameters without a gradient are not stepped.
        gradients = [parameter.grad for parameter in parameters]
        for index, parameter in enumerate(parameters):
            if index % ranks != rank:
                parameter.grad = None
        loss = super().step(closure)
        for index, parameter in enumerate(parameters):
            parameter.grad = gradients[index]
            sends = self.sends_matrices or parameter.ndim < 2
            if ranks > 1 and sends:
                dist.broadcast(parameter.data, index % ranks)
        return loss


class ForgetfulSGD(ShardedSGD):
    sends_matrices = False


def sends_all(parameters):
    return ShardedSGD(parameters, lr=0.1, foreach=False)


def sends_only_biases(parameters):
    # Wrong: the other ranks keep their old matrices.
    return ForgetfulSGD(parameters, lr=0.1, foreach=False)


BUG = KnownBug(
    title="a sharded optimizer does not send all that it has updated",
    reports=("lodestone-rock/RamTorch#13",),
    model=make_model,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged, optimizer=sends_all),
    wrong=Program(averaged, optimizer=sends_only_biases),
    first="0.weight",
    says="0.weight on rank 1: is not updated",
    rank=1,
)
