"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

FUSED = {"cpu", "cuda", "xpu", "mps"}  # where PyTorch has AdamW as one kernel


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """``adamw`` (PyTorch's defaults) or ``sgd`` (no momentum).

    AdamW hides a gradient that is wrong by a factor, because it divides by the gradient's size; SGD shows it.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    # A group a mesh: PyTorch updates the tensors of a group at once, and DTensors of several meshes it cannot.
    groups = [{"params": group} for group in by_mesh.values()]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    kinds = {parameter.device.type for group in by_mesh.values() for parameter in group}
    return torch.optim.AdamW(groups, lr=lr, fused=kinds <= FUSED or None)
