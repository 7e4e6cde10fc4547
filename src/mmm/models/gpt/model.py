"""GPT-2's architecture, as nanoGPT trains it: learned positions, LayerNorm, GELU, the head tied to the embedding, and
dropout.

Queries, keys and values come from one matrix, whose rows are interleaved: those of head 0's query, key and value, then
head 1's, and so on. A rank that has some of the rows then has whole heads, and one product serves all three, as with
nanoGPT's matrix, which has all queries before all keys. Otherwise it is made as `mmm.models.llama.model` is: heads are
counted from the tensor, layers are in a ``ModuleDict`` under their global number, and forward skips what is missing.

Sources: Radford et al., "Language models are unsupervised multitask learners", 2019; github.com/karpathy/nanoGPT,
model.py, whose sizes, initial weights and settings these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.attention import causal_attention
from mmm.nn.draw import Init
from mmm.nn.dropout import Dropout
from mmm.nn.sizes import below_one


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT, whose feed-forward layers are ``4 * dim`` wide.

    `block_size`: the longest sequence, for which it has positions. `dropout`: of the sum of both embeddings, and of
    what a block adds to the residual stream; `attention_dropout`: of attention's weights, None for the same. `bias`:
    whether linear layers and norms have one, as GPT-2's do.
    """

    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    vocab_size: int = 50_304
    block_size: int = 1024
    dropout: float = 0.0
    attention_dropout: float | None = None
    bias: bool = False
    norm_eps: float = 1e-5

    # What other language models' configurations have, and formulas of memory and traffic read.
    n_experts, top_k = 0, 0
    tie_word_embeddings = True

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.dim

    @property
    def position_parameters(self) -> int:
        """Elements of the learned positions, which nanoGPT leaves out of its number of parameters."""
        return self.block_size * self.dim

    @property
    def weights_dropout(self) -> float:
        """Dropout of attention's weights."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def drops(self) -> bool:
        return self.dropout > 0 or self.weights_dropout > 0

    def problems(self) -> list[str]:
        """What is wrong with these sizes by themselves, one sentence each; empty when they fit together."""
        problems = below_one(self, ("dim", "n_layers", "n_heads", "vocab_size", "block_size"))
        for name in ("dropout", "attention_dropout"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                problems.append(f"{name} is {value}: it must be at least 0, and below 1")
        if not 0 < self.norm_eps < math.inf:
            problems.append(f"norm_eps is {self.norm_eps}: it must be above 0, and finite")
        if not problems and self.dim % self.n_heads:
            problems.append(f"dim {self.dim} is not divisible by n_heads {self.n_heads}")
        return problems


# gpt2: nanoGPT's defaults, with the vocabulary of GPT-2 (50,257) rounded up. shakespeare and shakespeare-cpu: its
# config/train_shakespeare_char.py, and what its README changes of that for a CPU; a text has its own vocabulary.
PRESETS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(),
    "shakespeare": GPTConfig(dim=384, n_layers=6, n_heads=6, vocab_size=65, block_size=256, dropout=0.2),
    "shakespeare-cpu": GPTConfig(dim=128, n_layers=4, n_heads=4, vocab_size=65, block_size=64),
}


class GPTAttention(nn.Module):
    """Causal attention.

    Attributes:
        attention_fn: as of `mmm.models.llama.model.Attention`. While weights are dropped it is not called: attention is
            then computed here, score by score, since no kernel takes the choice of elements.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_fn: Callable[..., Tensor] = causal_attention
        self.head_dim = config.head_dim
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.dropout = Dropout(config.weights_dropout, layer)

    def forward(self, x: Tensor, document_starts: Tensor | None = None, sample_keys: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.wqkv(x).view(batch, seq, -1, 3, self.head_dim)  # (batch, seq, local heads, 3, head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))  # each (batch, local heads, seq, head_dim)
        if self.training and self.dropout.p > 0:
            out = self._dropping(q, k, v, document_starts, sample_keys)
        else:
            documents = () if document_starts is None else (document_starts,)
            out = self.attention_fn(q, k, v, *documents)  # (batch, local heads, seq, head_dim)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))  # (batch, seq, dim)

    def _dropping(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, sample_keys: Tensor | None
    ) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        hidden = place > place[:, None]  # (queries, keys)
        if document_starts is not None:
            hidden = hidden | (place < document_starts[:, None, :, None])  # (batch, 1, queries, keys)
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5  # (batch, local heads, queries, keys)
        scores = scores.masked_fill(hidden, -math.inf)
        weight = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(v.dtype)
        return self.dropout(weight, sample_keys) @ v


class GPTFeedForward(nn.Module):
    """``w2(gelu(w1 x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=config.bias)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class GPTBlock(nn.Module):
    """Pre-norm block, (batch, seq, dim) in and out.

    Args:
        number: of the layer, which decides what its dropouts drop.
    """

    def __init__(self, config: GPTConfig, number: int) -> None:
        super().__init__()
        first = 3 * number + 1  # 0 is the embedding's
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.attention = GPTAttention(config, first)
        self.dropout1 = Dropout(config.dropout, first + 1)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.feed_forward = GPTFeedForward(config)
        self.dropout2 = Dropout(config.dropout, first + 2)

    def forward(
        self, x: Tensor, positions: Tensor, document_starts: Tensor | None, sample_keys: Tensor | None
    ) -> Tensor:
        added = self.attention(self.attention_norm(x), document_starts=document_starts, sample_keys=sample_keys)
        x = x + self.dropout1(added, sample_keys, positions)
        return x + self.dropout2(self.feed_forward(self.ffn_norm(x)), sample_keys, positions)


class GPT(nn.Module):
    """Tokens (batch, seq) int64 to logits (batch, seq, vocab_size).

    A pipeline stage is this class with both embeddings, some ``layers``, or ``norm`` and ``output`` set to None or
    removed: it then takes, or returns, (batch, seq, dim).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if wrong := config.problems():
            raise ValueError("; ".join(wrong))
        self.config = config
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embeddings: nn.Module | None = nn.Embedding(config.block_size, config.dim)
        self.dropout = Dropout(config.dropout, 0)
        self.layers = nn.ModuleDict({str(i): GPTBlock(config, i) for i in range(config.n_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_starts: Tensor | None = None,
        sample_keys: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            tokens: (batch, seq) int64, or hidden states (batch, seq, dim) where the embeddings are missing.
            positions: (seq,) int64 global position of each token, below ``block_size``; 0, 1, 2, … if None.
            document_starts: (batch, full seq) int64, as of `mmm.models.llama.model.Transformer`: positions begin anew
                with each document.
            sample_keys: (batch,) int64, for dropout (`mmm.nn.dropout.sample_keys`).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        h = tokens
        if self.tok_embeddings is not None and self.pos_embeddings is not None:
            # (1, seq), or (batch, seq) with documents
            in_document = positions[None] if document_starts is None else positions - document_starts[:, positions]
            h = self.tok_embeddings(tokens) + self.pos_embeddings(in_document)  # (batch, seq, dim)
            h = self.dropout(h, sample_keys, positions)
        for layer in self.layers.values():
            h = layer(h, positions, document_starts, sample_keys)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h  # (batch, seq, vocab_size)

    def init_rule(self, name: str) -> Init:
        """GPT-2's: norms 1, biases 0, all else normal with 0.02, but 0.02 / sqrt(2 · n_layers) where a block writes
        into the residual stream.

        Args:
            name: the canonical parameter name.
        """
        if name.endswith("bias"):
            return Init("constant", 0.0)
        if "norm" in name:
            return Init("constant", 1.0)
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            return Init("normal", 0.02 / math.sqrt(2 * self.config.n_layers))
        return Init("normal", 0.02)
