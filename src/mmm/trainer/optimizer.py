"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """``adamw`` (PyTorch's defaults) or ``sgd`` (no momentum).

    AdamW hides a gradient that is wrong by a factor, because it divides by the gradient's size; SGD shows it.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr)
