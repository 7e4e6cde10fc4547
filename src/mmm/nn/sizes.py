"""Checks that the configurations of all models have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """One sentence for each size of `config` that is below 1. A size that is None follows from the others.

    Args:
        names: the fields of `config` to look at.
    """
    problems = []
    for name in names:
        size = getattr(config, name)
        if size is not None and size < 1:
            problems.append(f"{name} is {size}: it must be at least 1")
    return problems


def expert_problems(config: Any) -> list[str]:
    """One sentence for each size of `config` that is wrong about its experts."""
    if config.n_experts < 0:
        return [f"n_experts is {config.n_experts}: it must be at least 1, or 0 for none"]
    problems = []
    if config.n_experts > 0:
        if config.expert_hidden_dim < 1:
            problems.append(f"expert_dim is {config.expert_dim}: it must be at least 1")
        if not 1 <= config.top_k <= config.n_experts:
            problems.append(
                f"top_k is {config.top_k}: a token goes to at least 1 and at most all n_experts {config.n_experts}"
            )
    return problems


def rotary_problems(config: Any) -> list[str]:
    """One sentence for each number of `config` that is wrong about its norms and rotary positions."""
    problems = []
    for name in ("norm_eps", "rope_theta"):
        value = getattr(config, name)
        # NaN is refused as well.
        if not 0 < value < math.inf:
            problems.append(f"{name} is {value}: it must be above 0, and finite")
    if config.rope_scaling is not None:
        problems += config.rope_scaling.problems()
    return problems


def check_images(
    images: Tensor,
    channels: int,
    size: int,
    model: str,
) -> None:
    """Raises ValueError where images do not have the sizes that a model was made for.

    Args:
        images: (batch, channels, size, size).
        model: what the model is called, for the message.
    """
    shape = tuple(images.shape[1:])
    expected = (channels, size, size)
    if shape != expected:
        raise ValueError(
            f"images of shape {shape}, but this {model} is made for {expected}: change channels and image_size, or the "
            f"images"
        )
