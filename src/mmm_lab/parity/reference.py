"""What every layout is compared with: plain PyTorch, one process, the whole batch at once. Nothing knows a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mmm.data.images import digits
from mmm.data.images.image_set import ImagesInMemory
from mmm.errors import ConfigError
from mmm.layout import PADDING
from mmm.nn import draw, weights
from mmm.nn.attention import Documents
from mmm.nn.dropout import has_dropout, sample_keys
from mmm_lab.parity.parity_model import ParityModel

GLOBAL_BATCH = 16  # samples, if nobody says: 8 data-parallel coordinates of 2 micro-batches, or 4 stages of 8
WITH_PADDING = ("packed", "chats")  # data of which some tokens have no target
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Training:
    """How long, and on what: the same for the reference and for every layout.

    Attributes:
        steps: number of steps.
        seed: seed of the weights and of the batches.
        dtype: a key of `DTYPES`.
        global_batch: samples of a step.
        data: as in `mmm_lab.parity.layouts.ParityCase`.
    """

    steps: int = 10
    seed: int = 0
    dtype: str = "fp64"
    global_batch: int = GLOBAL_BATCH
    data: str = "made_up"


@dataclass(frozen=True)
class Reference:
    """Losses of each step, and each parameter's gradient at step 1."""

    losses: list[float]
    gradients: dict[str, Tensor]


def batch(parity: ParityModel, training: Training, step: int) -> tuple[Tensor, ...]:
    """Returns inputs and targets of a step's global batch, which depends only on the seed and the step. If packed, also
    where each token's document begins, (batch, seq), which `mmm.nn.attention.Documents.of` takes.

    Raises:
        ConfigError: digits for a model that takes no images, packed or chats for one that takes none of these.
    """
    # A step's own seed: batches of two seeds do not overlap within a million steps.
    generator = torch.Generator().manual_seed(1_000_003 * training.seed + step)
    if training.data == "packed":
        if parity.documents is None:
            raise ConfigError("--data packed: the model takes no documents (ParityModel.documents); leave it out")
        return parity.documents(training.global_batch, generator)
    if training.data == "chats":
        if parity.chats is None:
            raise ConfigError("--data chats: the model takes no conversations (ParityModel.chats); leave it out")
        return parity.chats(training.global_batch, generator)
    inputs, targets = parity.batch(training.global_batch, generator)
    if training.data == "digits":
        # (batch, channels, size, size)
        if inputs.ndim != 4 or inputs.shape[-1] != inputs.shape[-2]:
            raise ConfigError(
                f"--data digits: the model takes no square images, but inputs of shape "
                f"{tuple(inputs.shape[1:])}; leave it out"
            )
        images = _digits(inputs.shape[-1], inputs.shape[1])
        # The model's own targets only say how many images are drawn.
        indices = torch.randint(images.samples, targets.shape, generator=generator)
        inputs, targets = images.images(indices.numpy())
    dtype = DTYPES[training.dtype]
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    if targets.is_floating_point():
        targets = targets.to(dtype)
    return inputs, targets


@lru_cache
def _digits(size: int, channels: int) -> ImagesInMemory:
    """Returns handwritten digits, brought to the model's size as the trainers do."""
    train_set, *_ = digits.load(size, channels)
    return train_set


def train(parity: ParityModel, training: Training, optimizer: str, make: Callable[..., Optimizer]) -> Reference:
    """Train the model.

    Args:
        optimizer: a key of `mmm_lab.parity.optimizers.RATES`.
        make: (name, parameters) → the optimizer. It is handed in: LARS and LAMB know shards, and nothing here does.
    """
    model = parity.model()
    # Buffers stay what the constructor has made them; weights are drawn by name, as on every layout.
    draw.convert(model, DTYPES[training.dtype])
    weights.initialize(model, training.seed)
    update = make(optimizer, model.parameters())
    losses = []
    gradients = {}
    for step in range(training.steps):
        inputs, targets, *documents = batch(parity, training, step)
        extra: dict[str, Any] = {}
        if documents:
            extra["documents"] = Documents.of(documents[0])
        if has_dropout(model):
            extra["sample_keys"] = sample_keys(training.seed, step, 0, training.global_batch)
        count = targets.numel()
        if training.data in WITH_PADDING:
            count = int((targets != PADDING).sum())
        loss = parity.mean_loss(model(inputs, **extra), targets, count)
        loss.backward()
        for parameter in model.parameters():
            # No sample of the batch has used it, such as an expert without tokens. On a mesh it has zeros.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        # Copies: `zero_grad` and the optimizer change them.
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        update.step()
        update.zero_grad()
        if parity.after_step is not None:
            parity.after_step(model)
        losses.append(loss.item())
    return Reference(losses, gradients)
