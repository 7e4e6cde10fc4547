"""The optimizers of the reference, for full tensors: PyTorch's, and the package's own LARS and LAMB, which
`tests/mmm/optim/test_layerwise.py` compares with the papers' formulas."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mmm.optim.layerwise import make_layerwise

RATES = {"sgd": 0.3, "adamw": 1e-2, "lars": 1.0, "lamb": 1e-2}


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make SGD without momentum, or AdamW as PyTorch has it; LARS or LAMB."""
    lr = RATES[name]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr)
    return make_layerwise(name, parameters, lr)
