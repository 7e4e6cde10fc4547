"""Rotary positions, also beyond the length that a model was trained on, where their frequencies are scaled.

Names and meaning as ``rope_scaling`` in the config.json of Hugging Face's models.

Sources: Chen et al., "Extending context window of large language models via positional interpolation", 2023 (linear);
Llama Team, "The Llama 3 herd of models", 2024, and the reference code of Llama 3.1 (llama3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mmm.nn.draw import accum_dtype


@dataclass(frozen=True)
class RopeScaling:
    """``linear``: all frequencies divided by `factor`, as if positions were. ``llama3``: only the low ones, which turn
    less than `low_freq_factor` times within the original length; those that turn more than `high_freq_factor` times
    stay, and between the two the divisor goes over from the one to the other.

    Attributes:
        original_max_position_embeddings: the original length, in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> RopeScaling | None:
        """What a config.json says; None where it says nothing, or ``default``.

        Raises:
            ValueError: a key that is unknown, missing or of no number.
        """
        if config is None:
            return None
        if not isinstance(config, Mapping):
            raise ValueError(f"rope_scaling: {config!r} is not a mapping")
        config = dict(config)
        older = config.pop("type", None)
        kind = config.setdefault("rope_type", older or "default")
        takes = {"default": (), "linear": ("factor",), "llama3": tuple(field.name for field in fields(cls))[1:]}
        if not isinstance(kind, str) or kind not in takes or older not in (None, kind):
            raise ValueError(
                f"rope_scaling: rope_type {kind!r} is not one of {', '.join(takes)}, or not type {older!r}"
            )
        for name in config.keys() ^ {"rope_type", *takes[kind]}:
            raise ValueError(
                f"rope_scaling: rope_type {kind} takes {', '.join(takes[kind]) or 'nothing else'}: see {name}"
            )
        for name in takes[kind]:
            if type(config[name]) not in (int, float):
                raise ValueError(f"rope_scaling: {name} is {config[name]!r}, which is no number")
        return None if kind == "default" else cls(**config)

    def problems(self) -> list[str]:
        """What is wrong with the numbers, one sentence each."""
        problems = []
        if not 1 <= self.factor < math.inf:
            problems.append(f"rope_scaling: factor is {self.factor}: it must be at least 1, and finite")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            low, high = self.low_freq_factor, self.high_freq_factor
            problems.append(f"rope_scaling: low_freq_factor {low} must be above 0, and below high_freq_factor {high}")
        if not self.original_max_position_embeddings >= 1:
            length = self.original_max_position_embeddings
            problems.append(f"rope_scaling: original_max_position_embeddings is {length}: it must be at least 1")
        return problems

    def scaled(self, frequencies: Tensor) -> Tensor:
        """
        Args:
            frequencies: radians a token, any shape.
        """
        if self.rope_type == "linear":
            return frequencies / self.factor
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original length
        unscaled = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled = unscaled.clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles.

    Args:
        positions: (…, seq) int64, of each local token in the full sequence, or in its document.
        head_dim: even. theta: base of the wavelengths. scaling: of the frequencies.

    Returns:
        Two tensors (…, seq, head_dim / 2), float64, since a float32 angle is wrong by 0.008 rad at position 131,072;
        float32 on devices without it.
    """
    dtype = accum_dtype(positions.device)
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device) / head_dim
    frequencies = theta**-exponent if scaling is None else scaling.scaled(theta**-exponent)
    angle = positions.to(dtype)[..., None] * frequencies  # (…, seq, head_dim / 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of each head by its position's angle, in float32 or wider; the result has the dtype of x.

    Args:
        x: (batch, seq, heads, head_dim). cos, sin: (seq, head_dim / 2), or one for each sample.
    """
    rotated_in = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(rotated_in).unsqueeze(-2), sin.to(rotated_in).unsqueeze(-2)  # (…, seq, 1, head_dim / 2)
    even, odd = x.to(rotated_in).unflatten(-1, (-1, 2)).unbind(-1)  # each (batch, seq, heads, head_dim / 2)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)  # (…, head_dim / 2, 2)
    return rotated.flatten(-2).to(x.dtype)  # (batch, seq, heads, head_dim)
