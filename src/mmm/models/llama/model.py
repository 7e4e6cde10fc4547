"""A Llama-style Transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, plain or as routed experts.

This file knows nothing about meshes. Two choices make the model easy to parallelize:
  * Heads are counted from the tensor, not from the configuration. So the same code runs on a rank with some of the
    heads.
  * Layers are in a ``ModuleDict`` under their global number, and forward skips what is missing. So a pipeline stage is
    the same class with modules left out, and parameter names are the same everywhere.

Sources: Touvron et al., "LLaMA", 2023; Su et al., "RoFormer", 2021; Ainslie et al., "GQA", 2023; Shazeer, "GLU
Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.attention import Documents, causal_attention
from mmm.nn.experts import MixtureOfExperts
from mmm.nn.init import Init
from mmm.nn.rope import RopeScaling, rotary_table, rotate
from mmm.nn.sizes import below_one, expert_problems, rotary_problems


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a Transformer.

    Attributes:
        dim: width of the residual stream.
        n_heads: number of query heads.
        n_kv_heads: number of key/value heads. Each serves ``n_heads / n_kv_heads`` query heads.
        ffn_dim: width of the feed-forward layer. None for two thirds of ``4 * dim``, rounded up to `multiple_of`.
        rope_theta: base of the rotary frequencies.
        n_experts: number of experts in each layer; 0 for a plain feed-forward layer.
        top_k: number of experts that each token uses.
        expert_dim: width of an expert. None for that of the feed-forward layer.
        tie_word_embeddings: whether the output matrix is the embedding's, as one parameter.
        head_width: width of a head. None for ``dim / n_heads``.
        qkv_bias: whether queries, keys and values have biases, as Qwen2's have.
        window: number of tokens that a token attends to, itself and those just before it, as Mistral's do. None for
            all.
        softmax_router: whether the scores of experts are a softmax, as Mixtral's are, and not sigmoids.
    """

    model_name: ClassVar[str] = "llama"

    dim: int = 256
    n_layers: int = 4
    n_heads: int = 32
    n_kv_heads: int = 8
    vocab_size: int = 256
    ffn_dim: int | None = None
    multiple_of: int = 360
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    n_experts: int = 0
    top_k: int = 2
    expert_dim: int | None = None
    tie_word_embeddings: bool = False
    head_width: int | None = None
    qkv_bias: bool = False
    window: int | None = None
    softmax_router: bool = False

    # A softmax's weights of a token's experts add up to 1.
    norm_topk = True
    # Rotary positions are computed, not learned.
    position_parameters = 0

    @property
    def head_dim(self) -> int:
        if self.head_width is None:
            return self.dim // self.n_heads
        return self.head_width

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        # SwiGLU has three matrices. Two thirds of 4 dim give as many parameters as two matrices of 4 dim.
        width = int(8 * self.dim / 3)
        return math.ceil(width / self.multiple_of) * self.multiple_of

    @property
    def expert_hidden_dim(self) -> int:
        """Width of one expert."""
        if self.expert_dim is None:
            return self.hidden_dim
        return self.expert_dim

    def problems(self) -> list[str]:
        """What is wrong with these sizes on any layout, one sentence each. Empty if they fit together."""
        sizes = (
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "vocab_size",
            "ffn_dim",
            "head_width",
            "window",
        )
        problems = below_one(self, sizes)
        problems += expert_problems(self)
        problems += rotary_problems(self)
        # What follows divides by these sizes.
        if problems:
            return problems
        if self.head_width is None and self.dim % self.n_heads:
            problems.append(f"dim {self.dim} is not divisible by n_heads {self.n_heads}")
        elif self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd: rotary positions rotate pairs of elements")
        if self.n_heads % self.n_kv_heads:
            problems.append(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        return problems


# The sizes of llama-… are those of the published models: Llama 2 7B; Llama 3 8B and 70B; Llama 3.2 1B. So are those of
# Mistral 7B (version 0.1, the one with a window), Mixtral 8x7B (version 0.1) and Qwen2 0.5B. gpt2 has the width, depth
# and number of parameters of the smallest GPT-2, in this architecture.
PRESETS: dict[str, TransformerConfig] = {
    "debug": TransformerConfig(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=160,
    ),
    "small": TransformerConfig(),
    "reference": TransformerConfig(n_layers=24, vocab_size=32_000),
    "medium": TransformerConfig(
        dim=768,
        n_layers=12,
        n_heads=12,
        n_kv_heads=4,
        ffn_dim=2048,
    ),
    "shakespeare": TransformerConfig(
        dim=768,
        n_layers=12,
        n_heads=12,
        n_kv_heads=12,
        ffn_dim=2048,
    ),
    "shakespeare-cpu": TransformerConfig(
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        ffn_dim=344,
    ),
    "gpt2": TransformerConfig(
        dim=768,
        n_layers=12,
        n_heads=12,
        n_kv_heads=12,
        vocab_size=50_257,
        ffn_dim=2048,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
    "llama-1b": TransformerConfig(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        vocab_size=128_256,
        ffn_dim=8192,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
    ),
    "llama2-7b": TransformerConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        vocab_size=32_000,
        ffn_dim=11_008,
        rope_theta=10_000.0,
    ),
    "llama-8b": TransformerConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        vocab_size=128_256,
        ffn_dim=14_336,
    ),
    "mistral-7b": TransformerConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        vocab_size=32_000,
        ffn_dim=14_336,
        rope_theta=10_000.0,
        window=4096,
    ),
    "mixtral-8x7b": TransformerConfig(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        vocab_size=32_000,
        ffn_dim=14_336,
        rope_theta=1_000_000.0,
        n_experts=8,
        softmax_router=True,
    ),
    "qwen2-0.5b": TransformerConfig(
        dim=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        vocab_size=151_936,
        ffn_dim=4864,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        qkv_bias=True,
    ),
    "llama-70b": TransformerConfig(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        vocab_size=128_256,
        ffn_dim=28_672,
    ),
}


class Attention(nn.Module):
    """Causal grouped-query attention: every key/value head serves ``n_heads / n_kv_heads`` query heads.

    Attributes:
        attention_fn: computes attention from q, k, v, and from `documents` if a sequence has several.
            It is the one place where tokens meet. Context parallelism replaces it.
        window: the window of `attention_fn`. A replacement has to have it as well.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.window: int | None = config.window
        self.attention_fn: Callable[..., Tensor] = causal_attention
        if config.window is not None:
            self.attention_fn = partial(causal_attention, window=config.window)
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """
        Args:
            x: (batch, seq, dim).
            cos, sin: the rotary table, (seq, head_dim / 2), or (batch, seq, head_dim / 2) with documents.
            documents: as of `Transformer.forward`.
        """
        batch, seq, _ = x.shape
        # -1: under tensor parallelism a rank has only some of the heads.
        # (batch, seq, local heads, head_dim)
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        # (batch, seq, local kv heads, head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        q, k = self.rotated(q, k, cos, sin)
        # (batch, local heads, seq, head_dim), as attention kernels take it
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        # (batch, local heads, seq, head_dim)
        if documents is None:
            out = self.attention_fn(q, k, v)
        else:
            out = self.attention_fn(q, k, v, documents)
        # (batch, seq, local heads · head_dim)
        out = out.transpose(1, 2).reshape(batch, seq, -1)
        return self.wo(out)

    def rotated(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, each (batch, seq, local heads, head_dim), rotated by their positions."""
        return rotate(q, cos, sin), rotate(k, cos, sin)


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, seq, hidden_dim), then (batch, seq, dim)
        hidden = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(hidden)


class TransformerBlock(nn.Module):
    """Pre-norm block, (batch, seq, dim) in and out. With experts it has `moe`, without them `feed_forward`."""

    def __init__(self, config: TransformerConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.routed = config.n_experts > 0
        if self.routed:
            self.moe = MixtureOfExperts(
                config.dim,
                config.expert_hidden_dim,
                config.n_experts,
                config.top_k,
                softmax=config.softmax_router,
                norm_topk=config.norm_topk,
            )
        else:
            self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        # By name, because the tensor-parallel plan has layouts for three positional arguments: x, cos and sin.
        x = x + self.attention(self.attention_norm(x), cos, sin, documents=documents)
        feed_forward = self.moe if self.routed else self.feed_forward
        return x + feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens (batch, seq) int64 to logits (batch, seq, vocab_size).

    A pipeline stage is this class with ``tok_embeddings``, some ``layers``, or ``norm`` and ``output`` set to None or
    removed: it then takes, or returns, (batch, seq, dim).
    """

    attention: type[Attention] = Attention

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        problems = config.problems()
        if problems:
            raise ValueError("; ".join(problems))
        self.config = config
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config, self.attention) for i in range(config.n_layers)})
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """
        Args:
            tokens: (batch, seq) int64, or hidden states (batch, seq, dim) where the embedding is missing.
            positions: (seq,) int64, the global position of each token; 0, 1, 2, … if None.
            documents: where documents begin in the full sequences, if a sequence has several. Neither attention nor
                rotary positions cross the ends of a document.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        # (seq,), or (batch, seq) with documents, where positions begin anew with each.
        in_document = positions
        if documents is not None:
            in_document = positions - documents.start_of_token[:, positions]
        config = self.config
        cos, sin = rotary_table(in_document, config.head_dim, config.rope_theta, config.rope_scaling)
        h = tokens
        if self.tok_embeddings is not None:
            # (batch, seq, dim)
            h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, cos, sin, documents)
        if self.norm is not None:
            h = self.norm(h)
        if self.output is not None:
            # (batch, seq, vocab_size)
            h = self.output(h)
        return h

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn: GPT-2's rule.

        Norms are 1 and biases 0. Embedding and matrices are normal with standard deviation 0.02. Matrices that write
        into the residual stream have 0.02 / sqrt(2 · n_layers), so that it does not grow with the depth. The output has
        at most 1 / sqrt(dim), also where it is the embedding.

        Args:
            name: the canonical parameter name.
        """
        if name.endswith("bias"):
            return Init("constant", 0.0)
        if "norm" in name:
            return Init("constant", 1.0)
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight", "moe.experts.w2")):
            return Init("normal", 0.02 / math.sqrt(2 * self.config.n_layers))
        output = "output.weight"
        if self.config.tie_word_embeddings:
            output = "tok_embeddings.weight"
        if name == output:
            return Init("normal", min(0.02, self.config.dim**-0.5))
        return Init("normal", 0.02)

    def buffer_rule(self, name: str) -> Init | None:
        """How a buffer is made after the model was built on the meta device: the experts' bias starts as 0."""
        if name.endswith("moe.expert_bias"):
            return Init("constant", 0.0)
        return None
