"""A GPT as people write it: learned positions, LayerNorm, biases everywhere, a causal mask kept as a buffer, and an
output matrix that is the embedding's.

Plain PyTorch, and nothing of it was written for meshes but this: heads are counted from the tensor, where a rank may
hold some of them, and queries, keys and values are three matrices (cut by rows, one matrix of all three would give each
rank the wrong mix). It is the example of docs/models.md; its weights start as PyTorch's modules do, but for the rules
below.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.models.weights import Init


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; `seq_length`: the longest sequence that it takes, in tokens."""

    vocab_size: int = 96
    seq_length: int = 32
    dim: int = 64
    n_heads: int = 8
    n_layers: int = 3


class Attention(nn.Module):
    """Every token looks at itself and all before it.

    Attributes:
        attention_fn: the function of q, k and v, each (batch, heads, seq, head_dim); what cp replaces.
    """

    mask: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(config.dim, config.dim) for _ in range(4))
        mask = torch.ones(config.seq_length, config.seq_length).tril().bool()
        self.register_buffer("mask", mask)
        self.attention_fn: Callable[[Tensor, Tensor, Tensor], Tensor] = self.masked

    def masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq = q.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (batch, heads, seq, seq)
        return scores.masked_fill(~self.mask[:seq, :seq], -math.inf).softmax(dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        heads = (batch, seq, -1, self.head_dim)
        q, k, v = (matrix(x).view(heads).transpose(1, 2) for matrix in (self.query, self.key, self.value))
        out = self.attention_fn(q, k, v)  # (batch, heads held here, seq, head_dim)
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))  # (batch, seq, dim)


class Block(nn.Module):
    """Pre-norm, (batch, seq, dim) in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(config.dim, 4 * config.dim), nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (batch, seq) int64 to logits (batch, seq, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.places = nn.Embedding(config.seq_length, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """
        Args:
            tokens: (batch, seq). positions: (seq,) int64, of each in its sequence; 0, 1, 2, … if None.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(positions)  # (batch, seq, dim)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_rule(self, name: str) -> Init | None:
        """GPT-2's: matrices normal with 0.02, less where a block writes into the residual stream. For norms None.

        Biases start as noise, not as 0 as GPT-2's do, so that none of them is left out of a comparison.
        """
        if name.endswith("bias") and "norm" not in name:
            return Init("normal", 0.02)
        if name.endswith(("attention.out.weight", "down.weight")):
            return Init("normal", 0.02 / math.sqrt(2 * self.config.n_layers))
        return Init("normal", 0.02) if "norm" not in name else None


def parity_model() -> GPT:
    """A small one to try layouts on: heads, widths and vocabulary divide by 8."""
    return GPT(GPTConfig())


def parity_batch(samples: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and the ones after them: sequences that count upwards in steps of 1, 2 or 3. Each (samples, 32) int64."""
    first = torch.randint(96, (samples, 1), generator=numbers)
    step = torch.randint(1, 4, (samples, 1), generator=numbers)
    tokens = (first + step * torch.arange(33)) % 96  # (samples, 33)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
