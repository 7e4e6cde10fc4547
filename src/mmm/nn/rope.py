"""Rotary positions. With scaled frequencies they reach beyond the length that a model was trained on.

Names and their meaning are those of ``rope_scaling`` in the config.json of Hugging Face's models.

Sources: Chen et al., "Extending context window of large language models via positional interpolation", 2023 (linear);
Llama Team, "The Llama 3 herd of models", 2024, and the reference code of Llama 3.1 (llama3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmm.nn.init import accum_dtype

# The keys that each rope_type takes, next to itself.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions are scaled.

    ``linear`` divides all frequencies by `factor`, as if positions were divided. ``llama3`` divides only the low ones,
    which turn less than `low_freq_factor` times within the original length. Those that turn more than
    `high_freq_factor` times stay. In between, the divisor changes gradually from the one to the other.

    Attributes:
        rope_type: ``linear`` or ``llama3``.
        factor: what frequencies are divided by, at least 1.
        original_max_position_embeddings: the length that the model was trained on, in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> RopeScaling | None:
        """The scaling that a config.json describes. None where it describes none, or ``default``.

        Args:
            config: the value of ``rope_scaling``.

        Raises:
            ValueError: a key is unknown or missing, or its value is not a number.
        """
        if config is None:
            return None
        if not isinstance(config, Mapping):
            raise ValueError(f"rope_scaling: {config!r} is not a mapping")
        config = dict(config)
        # Older files call rope_type just type; some have both.
        older = config.pop("type", None)
        kind = config.setdefault("rope_type", older or "default")
        is_known = isinstance(kind, str) and kind in ROPE_KEYS
        if not is_known or older not in (None, kind):
            kinds = ", ".join(ROPE_KEYS)
            raise ValueError(f"rope_scaling: rope_type {kind!r} is not one of {kinds}, or not type {older!r}")
        keys = ROPE_KEYS[kind]
        # Keys that are missing, and keys that are too many.
        for name in config.keys() ^ {"rope_type", *keys}:
            takes = ", ".join(keys) or "nothing else"
            raise ValueError(f"rope_scaling: rope_type {kind} takes {takes}: see {name}")
        for name in keys:
            value = config[name]
            # Not isinstance: a bool is not a number here.
            if type(value) not in (int, float):
                raise ValueError(f"rope_scaling: {name} is {value!r}, which is not a number")
        if kind == "default":
            return None
        return cls(**config)

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        low = self.low_freq_factor
        high = self.high_freq_factor
        length = self.original_max_position_embeddings
        for value in (self.factor, low, high, length):
            # PyTorch takes floats of any size.
            if isinstance(value, int) and value >= 2**63:
                return ["rope_scaling: an integer in it does not fit in 64 bits"]
        problems = []
        if not 1 <= self.factor < math.inf:
            problems.append(f"rope_scaling: factor is {self.factor}: it must be at least 1, and finite")
        if not 0 < low < high < math.inf:
            problems.append(f"rope_scaling: low_freq_factor {low} must be above 0, and below high_freq_factor {high}")
        if not length >= 1:
            problems.append(f"rope_scaling: original_max_position_embeddings is {length}: it must be at least 1")
        return problems

    def scaled(self, frequencies: Tensor) -> Tensor:
        """The scaled frequencies.

        Args:
            frequencies: in radians a token, any shape.
        """
        if self.rope_type == "linear":
            return frequencies / self.factor
        # Turns within the original length.
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        # The share of a frequency that is not scaled: 0 for low ones, 1 for high ones.
        unscaled = (turns - self.low_freq_factor) / width
        unscaled = unscaled.clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


def rotary_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles.

    Args:
        positions: (…, seq) int64, the place of each local token in the full sequence, or in its document.
        head_dim: an even number.
        theta: the base of the wavelengths.
        scaling: how frequencies are scaled; None: not at all.

    Returns:
        Two tensors (…, seq, head_dim / 2), float64, because a float32 angle is wrong by 0.008 rad at position 131,072;
        float32 on devices without float64.
    """
    device = positions.device
    dtype = accum_dtype(device)
    # (head_dim / 2,), in radians a token.
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    frequencies = theta**-exponent
    if scaling is not None:
        frequencies = scaling.scaled(frequencies)
    # (…, seq, head_dim / 2)
    angle = positions.to(dtype)[..., None] * frequencies
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of each head by its position's angle, in float32 or wider.

    Args:
        x: (batch, seq, heads, head_dim).
        cos, sin: (seq, head_dim / 2), or (batch, seq, head_dim / 2).

    Returns:
        The shape and dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # (…, seq, 1, head_dim / 2): the same for all heads.
    cos = cos.to(wide).unsqueeze(-2)
    sin = sin.to(wide).unsqueeze(-2)
    # Each (batch, seq, heads, head_dim / 2).
    pairs = x.to(wide).unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    rotated_even = even * cos - odd * sin
    rotated_odd = even * sin + odd * cos
    # (batch, seq, heads, head_dim / 2, 2) → (batch, seq, heads, head_dim)
    rotated = torch.stack((rotated_even, rotated_odd), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
