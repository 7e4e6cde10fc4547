"""ZeRO-2 by hand: each rank keeps the optimizer's state of its own shard.

Every rank has all parameters, as one flat vector, and the gradient of its own samples. It takes the mean of the
gradients only for *its* shard of the vector, updates that shard with a momentum that no other rank has, and gets the
other shards from the ranks that have updated them::

    gradients ─ reduce-scatter ─► my shard ─ momentum, step ─► my shard ─ all-gather ─► all parameters

``reduce_scatter(x, group)`` and ``all_gather(shard, group)`` are given. SGD with momentum: m ← 0.9 m + g, then
p ← p - lr m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, make_numbers

FUNCTION = "update"
TEMPLATE = '''
import torch.distributed as dist

from mmm_lab.exercises.tools import all_gather, reduce_scatter


def update(parameters, gradients, momentum, lr, group):
    """Return all parameters after one step.

    Args:
        parameters: (elements,), the same on every rank; their number divides over the ranks.
        gradients: (elements,), from this rank's own samples.
        momentum: (elements / ranks,), of this rank's shard only, to be changed in place.
        lr: the learning rate.
        group: the ranks.
    """
    raise NotImplementedError
'''
LR = 0.1
MOMENTUM = 0.9


class _Optimizer:
    """The answer as an optimizer: all parameters as one flat vector, with the momentum of this rank's shard."""

    def __init__(self, parameters: Iterable[nn.Parameter], update: Callable[..., Tensor]) -> None:
        self.parameters = list(parameters)
        self.update = update
        ranks = dist.get_world_size()
        elements = sum(parameter.numel() for parameter in self.parameters)
        # So that the shards have the same size.
        self.padding = -elements % ranks
        self.momentum = self.parameters[0].new_zeros((elements + self.padding) // ranks)

    @torch.no_grad()
    def step(self) -> None:
        before = self._flat(self.parameters)
        # The rank's own gradients, which `step` below has kept; `grad` has their mean.
        own = self._flat([parameter.own_gradient for parameter in self.parameters])  # type: ignore[attr-defined]
        after = self.update(before.clone(), own, self.momentum, LR, dist.group.WORLD)
        if after.shape != before.shape:
            raise ValueError(f"{after.numel()} parameters come back, of {before.numel()}")
        vector_to_parameters(after, self.parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        return F.pad(parameters_to_vector(tensors), (0, self.padding))


def check(update: Callable[..., Tensor]) -> Result:
    """Compare the weights after each of two steps with those of SGD on one device."""

    def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
        pass

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, targets = batch
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        if mesh is not None:
            # The answer gets the rank's own gradients; the check looks at their mean.
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.own_gradient = parameter.grad.clone()  # type: ignore[attr-defined]
                dist.all_reduce(parameter.grad)
                parameter.grad /= mesh.size()
        return loss

    def optimizer(parameters: Iterable[nn.Parameter]) -> Any:
        if dist.is_initialized():
            return _Optimizer(parameters, update)
        return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)

    return verified(
        FUNCTION,
        ("dp2", "dp4"),
        model_fn=Net,
        parallelize_fn=nothing,
        batch_fn=make_numbers,
        step_fn=step,
        optimizer_fn=optimizer,
    )
