"""A GPT's weights: the fields of its sizes, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmm.errors import CheckpointError
from mmm.models.gpt import GPT, GPTConfig

# Fields of GPTConfig: what they may be, and the least of an int.
TYPES: dict[str, tuple[tuple[type, ...], int]] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "vocab_size", "block_size"), ((int,), 1)),
    "dropout": ((int, float), 0),
    "attention_dropout": ((int, float, type(None)), 0),
    "bias": ((bool,), 0),
    "norm_eps": ((int, float), 0),
}


def is_gpt(sizes: Mapping[str, Any]) -> bool:
    """Whether sizes are a GPT's: it alone has learned positions."""
    return "block_size" in sizes


def shapes_of(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a GPT of these sizes, by name; the tied weight once. Raises CheckpointError: they are no sizes."""
    config = GPTConfig(**sizes)
    if wrong := config.problems():
        raise CheckpointError(wrong[0])
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
