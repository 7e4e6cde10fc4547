"""What every layout is held against: plain PyTorch, one process, the whole batch at once. Nothing here knows a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.models import weights

GLOBAL_BATCH = 16  # samples: 8 data-parallel coordinates with 2 micro-batches, or 4 stages with 8
RATES = {"sgd": 0.3, "adamw": 1e-2}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Training:
    """How long, and of what: the same for the reference and for every layout. dtype: a key of `DTYPES`."""

    steps: int = 10
    seed: int = 0
    dtype: str = "fp64"


@dataclass(frozen=True)
class Reference:
    """Losses of each step, and each parameter's gradient at step 1."""

    losses: list[float]
    gradients: dict[str, Tensor]


def batch(source: ModuleType, training: Training, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step's global batch, which depends on seed and step alone."""
    numbers = torch.Generator().manual_seed(1_000_003 * training.seed + step)
    inputs, targets = source.parity_batch(GLOBAL_BATCH, numbers)
    return inputs.to(DTYPES[training.dtype]) if inputs.is_floating_point() else inputs, targets


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without momentum, or AdamW as PyTorch has it."""
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    return kind(parameters, lr=RATES[name])


def train(source: ModuleType, training: Training, optimizer: str) -> Reference:
    """Train the model of a module.

    Args:
        source: a module with ``parity_model``, ``parity_batch`` and, where a step changes more than an optimizer does,
            ``parity_after_step``. optimizer: ``sgd`` or ``adamw``.
    """
    model: nn.Module = source.parity_model()  # its buffers are what its constructor makes them
    weights.convert(model, DTYPES[training.dtype])
    weights.initialize(model, training.seed)
    update = make_optimizer(optimizer, model.parameters())
    losses, gradients = [], {}
    for step in range(training.steps):
        inputs, targets = batch(source, training, step)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        update.step()
        update.zero_grad()
        if hasattr(source, "parity_after_step"):
            source.parity_after_step(model)
        losses.append(loss.item())
    return Reference(losses, gradients)
