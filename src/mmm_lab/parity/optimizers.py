"""The optimizers of the reference, for full tensors: PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

RATES = {"sgd": 0.3, "adamw": 1e-2}


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make SGD without momentum, or AdamW as PyTorch has it."""
    lr = RATES[name]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr)
