"""Qwen3: a Llama with a norm over each head of queries and keys, and with heads of any width; with experts Qwen3-MoE.

Source: Yang et al., "Qwen3 technical report", 2025. The presets have the sizes of the published models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from mmm.models.llama.model import Attention, Transformer
from mmm.nn.rope import RopeScaling
from mmm.nn.sizes import below_one, expert_problems, rotary_problems


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen3, as in `mmm.models.llama.model.TransformerConfig`. ``ffn_dim=None`` means ``3 * dim``.

    Attributes:
        norm_topk: whether the weights of a token's experts are divided by their sum.
    """

    model_name: ClassVar[str] = "qwen3"

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    ffn_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = True
    n_experts: int = 0
    top_k: int = 0
    expert_dim: int | None = None
    norm_topk: bool = False

    softmax_router = True
    # Fields that Transformer reads. A Qwen3 has none of these features.
    position_parameters = 0
    qkv_bias = False
    window = None

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer."""
        if self.ffn_dim is None:
            return 3 * self.dim
        return self.ffn_dim

    @property
    def expert_hidden_dim(self) -> int:
        """Width of one expert."""
        if self.expert_dim is None:
            return self.hidden_dim
        return self.expert_dim

    def problems(self) -> list[str]:
        """What is wrong with these sizes on any layout, one sentence each. Empty if they fit together."""
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "ffn_dim")
        problems = below_one(self, sizes) + expert_problems(self)
        problems += rotary_problems(self)
        # What follows divides by these sizes.
        if problems:
            return problems
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd: rotary positions rotate pairs of elements")
        if self.n_heads % self.n_kv_heads:
            problems.append(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        return problems


PRESETS: dict[str, Qwen3Config] = {
    "debug": Qwen3Config(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        vocab_size=256,
    ),
    "0.6b": Qwen3Config(),
    "4b": Qwen3Config(
        dim=2560,
        n_layers=36,
        n_heads=32,
        ffn_dim=9728,
    ),
    "8b": Qwen3Config(
        dim=4096,
        n_layers=36,
        n_heads=32,
        ffn_dim=12_288,
        tie_word_embeddings=False,
    ),
    # A Qwen3-MoE.
    "30b-a3b": Qwen3Config(
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        ffn_dim=6144,
        tie_word_embeddings=False,
        n_experts=128,
        top_k=8,
        expert_dim=768,
        norm_topk=True,
    ),
}


class Qwen3Attention(Attention):
    """Grouped-query attention whose queries and keys are normalized, head by head, before they are rotated."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # One weight of (head_dim,) for all heads.
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def rotated(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return super().rotated(self.q_norm(q), self.k_norm(k), cos, sin)


class Qwen3(Transformer):
    """A `Transformer` with `Qwen3Attention` in its blocks."""

    attention = Qwen3Attention
