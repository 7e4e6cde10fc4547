"""The optimizers of the reference: PyTorch's, and LARS and LAMB, which PyTorch does not have, of full tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

RATES = {"sgd": 0.3, "adamw": 1e-2, "lars": 1.0, "lamb": 1e-2}


class PlainLARS(torch.optim.Optimizer):
    """You et al., 2017, algorithm 1: μ = 0.9, λ = 5e-4, η = 1e-3; biases and norms without λ and η."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for w in self.param_groups[0]["params"]:
            rate, decay = RATES["lars"], 0.0
            if w.ndim > 1:
                decay = 5e-4
                if w.norm() > 0 and w.grad.norm() > 0:
                    rate *= 1e-3 * w.norm() / (w.grad.norm() + decay * w.norm())
            v = self.state[w].get("v", torch.zeros_like(w))
            self.state[w]["v"] = v = 0.9 * v + rate * (w.grad + decay * w)
            w -= v


class PlainLAMB(torch.optim.Optimizer):
    """You et al., 2020, algorithm 2: β₁ = 0.9, β₂ = 0.999, ε = 1e-6, λ = 0.01, φ(z) = z; biases and norms without λ
    and the ratio."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for w in self.param_groups[0]["params"]:
            m, v = self.state[w].get("moments", (torch.zeros_like(w), torch.zeros_like(w)))
            m, v = 0.9 * m + 0.1 * w.grad, 0.999 * v + 0.001 * w.grad**2
            self.state[w]["moments"] = m, v
            update = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-6)
            rate = RATES["lamb"]
            if w.ndim > 1:
                update += 0.01 * w
                if w.norm() > 0 and update.norm() > 0:
                    rate *= w.norm() / update.norm()
            w -= rate * update


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without momentum, or AdamW as PyTorch has it; LARS or LAMB."""
    if name in ("lars", "lamb"):
        return {"lars": PlainLARS, "lamb": PlainLAMB}[name](parameters)
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](parameters, lr=RATES[name])
