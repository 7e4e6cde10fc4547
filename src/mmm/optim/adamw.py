"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.local import to_local

BETAS = (0.9, 0.999)  # PyTorch's
FUSED = {"cpu", "cuda", "xpu", "mps"}  # where PyTorch has AdamW as one kernel


class LocalAdamW(torch.optim.AdamW):
    """PyTorch's AdamW, whose kernel gets the local tensors: it updates each element by itself, and DTensor would first
    find out how the results are sharded, which takes a fifth of that of a small model's first step.

    Parameters, gradients and state stay the DTensors that they are.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *tensors)  # type: ignore[no-untyped-call]
        for each in tensors:
            each[:] = map(to_local, each)
        return has_complex


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float | None = None,
    decayed: str = "all",
    betas: tuple[float, float] | None = None,
) -> torch.optim.Optimizer:
    """``adamw`` (PyTorch's defaults) or ``sgd`` (no momentum).

    AdamW hides a gradient that is wrong by a factor, because it divides by the gradient's size; SGD shows it.

    Args:
        weight_decay: of AdamW. None: PyTorch's. decayed: ``all``, or ``matrices``: what has two dims or more.
        betas: of AdamW. None: PyTorch's.
    """
    groups = groups_of(parameters, weight_decay, decayed)
    if name == "sgd":
        return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=lr)
    return LocalAdamW(groups, lr=lr, betas=betas or BETAS, fused=fused(groups))


def groups_of(
    parameters: Iterable[nn.Parameter], weight_decay: float | None = None, decayed: str = "all"
) -> list[dict[str, Any]]:
    """Parameters in groups of one mesh and one weight decay; arguments as of `make_optimizer`."""
    # A group a mesh: PyTorch updates the tensors of a group at once, and DTensors of several meshes it cannot.
    alike: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        alike.setdefault((mesh, decayed == "all" or parameter.ndim > 1), []).append(parameter)
    rate = 0.01 if weight_decay is None else weight_decay
    return [{"params": group, "weight_decay": rate * decays} for (_, decays), group in alike.items()]


def fused(groups: Iterable[dict[str, Any]]) -> bool | None:
    """Whether AdamW of these is one kernel; None for what PyTorch takes instead."""
    return {parameter.device.type for group in groups for parameter in group["params"]} <= FUSED or None


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that a row of the record has as ``lr``: where groups have several, the largest."""
    return max(float(group["lr"]) for group in optimizer.param_groups)
