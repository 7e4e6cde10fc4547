"""ZeRO-2 by hand: each rank keeps the optimizer's state of its own part.

Every rank has all parameters, as one flat vector, and the gradient of its own samples. It takes the mean of the
gradients for *its* part of the vector alone, updates that part with a momentum that it alone has, and gets the other
parts from the ranks that have updated them::

    gradients ─ reduce-scatter ─► my part ─ momentum, step ─► my part ─ all-gather ─► all parameters

``reduce_scatter(x, group)`` and ``all_gather(part, group)`` are given. SGD with momentum: m ← 0.9 m + g, then
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

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, numbers

FUNCTION = "update"
TEMPLATE = '''
import torch.distributed as dist

from mmm_lab.exercises.tools import all_gather, reduce_scatter


def update(parameters, gradients, momentum, lr, group):
    """Return all parameters after one step.

    Args:
        parameters: flat, the same on every rank; their number divides over the ranks.
        gradients: flat, of this rank's own samples.
        momentum: of this rank's part alone, to be changed in place.
        group: the ranks.
    """
    raise NotImplementedError
'''
LR, MOMENTUM, STEPS = 0.1, 0.9, 2
NEAR = 1e-9


class _Optimizer:
    """Two steps with the same gradients, so that the momentum shows. On one device it is plain SGD."""

    def __init__(self, parameters: Iterable[nn.Parameter], update: Callable[..., Tensor]) -> None:
        self.parameters, self.update = list(parameters), update

    @torch.no_grad()
    def step(self) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        total = sum(p.numel() for p in self.parameters)
        length = -(-total // size) * size
        own = _flat([getattr(p, "own_gradient", p.grad) for p in self.parameters], length)
        mean, flat = _flat([p.grad for p in self.parameters], length), _flat(self.parameters, length)
        momentum, full_momentum = torch.zeros_like(flat[: length // size]), torch.zeros_like(flat)
        for number in range(STEPS):
            full_momentum.mul_(MOMENTUM).add_(mean)
            before, expected = flat, flat - LR * full_momentum
            if size == 1:
                flat = expected
                continue
            flat = self.update(before.clone(), own.clone(), momentum, LR, dist.group.WORLD)
            if number == 0 and (why := _wrong(flat, before, expected)):
                raise ValueError(why)
            if _wrong(flat, before, expected):
                raise ValueError("the first step is right, and the second is not: `momentum` is to be changed in place")
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, flat[:total].split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _flat(tensors: Iterable[Any], length: int) -> Tensor:
    joined = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(joined, (0, length - joined.numel()))


def _wrong(flat: Tensor, before: Tensor, expected: Tensor) -> str:
    """What is wrong with the parameters after a step; nothing if they are right."""
    if flat.shape != expected.shape:
        return f"{flat.numel()} parameters come back, of {expected.numel()}"
    size, rank = dist.get_world_size(), dist.get_rank()
    right = torch.isclose(flat, expected, rtol=NEAR, atol=NEAR)
    if right.all():
        return ""
    if right.chunk(size)[rank].all():
        return "this rank's part is right, and those of other ranks are not what these have made of them"
    if torch.allclose(flat - before, size * (expected - before), rtol=NEAR, atol=NEAR):
        return f"the step is {size} times too large: reduce_scatter adds up, and a mean is wanted"
    return "this rank's part is not what momentum and the mean of the ranks' gradients make of it"


def check(update: Callable[..., Tensor]) -> Result:
    """The weights after two steps are those of one device."""

    def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
        pass

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        if mesh is not None:  # the answer gets the rank's own gradients; the check looks at their mean
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.own_gradient = parameter.grad.clone()  # type: ignore[attr-defined]
                dist.all_reduce(parameter.grad)
                parameter.grad /= mesh.size()
        return loss

    return verified(
        FUNCTION,
        ("dp2", "dp4"),
        model_fn=Net,
        parallelize_fn=nothing,
        batch_fn=numbers,
        step_fn=step,
        optimizer_fn=lambda parameters: _Optimizer(parameters, update),
    )
