"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """``adamw`` (PyTorch's defaults) or ``sgd`` (no momentum).

    AdamW hides a gradient that is wrong by a factor, because it divides by the gradient's size; SGD shows it.
    """
    parameters = list(parameters)
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    # PyTorch updates many tensors at once on an accelerator, which does not go across meshes: there, one by one.
    foreach = False if len(meshes) > 1 else None
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, foreach=foreach)
    return torch.optim.AdamW(parameters, lr=lr, foreach=foreach)
