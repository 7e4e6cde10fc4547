"""GPT-2's architecture, as nanoGPT trains it: learned positions, LayerNorm, GELU, dropout, and an output that is tied
to the embedding.

Queries, keys and values come from one product with one matrix. Its rows are interleaved: first those of head 0's query,
key and value, then those of head 1, and so on. So a rank that has some of the rows has whole heads. (nanoGPT's matrix
has all queries before all keys: some of its rows would be some queries and no keys.) The rest is built as in
`mmm.models.llama.model`: heads are counted from the tensor, layers are in a ``ModuleDict`` under their global number,
and forward skips what is missing.

Sources: Radford et al., "Language models are unsupervised multitask learners", 2019; github.com/karpathy/nanoGPT,
model.py, whose sizes, initial weights and settings these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.attention import Documents, causal_attention
from mmm.nn.dropout import Dropout
from mmm.nn.init import Init
from mmm.nn.sizes import below_one


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. Its feed-forward layers are ``4 * dim`` wide.

    Attributes:
        dim: width of the residual stream.
        block_size: length of the longest sequence. The model has a learned position for each of its tokens.
        dropout: fraction of elements that are dropped, from the sum of both embeddings and from what a block adds to
            the residual stream.
        attention_dropout: fraction of attention's weights that are dropped. None for that of `dropout`.
        bias: whether linear layers and norms have biases, as GPT-2's do.
        tanh_gelu: whether GELU is computed by the approximation that GPT-2 has.
    """

    model_name: ClassVar[str] = "gpt"

    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    vocab_size: int = 50_304
    block_size: int = 1024
    dropout: float = 0.0
    attention_dropout: float | None = None
    bias: bool = False
    norm_eps: float = 1e-5
    tanh_gelu: bool = False

    # Sizes of other language models, which the formulas of memory and traffic read.
    n_experts = 0
    top_k = 0
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
        """Number of elements of the learned positions. nanoGPT does not count them as parameters."""
        return self.block_size * self.dim

    @property
    def weights_dropout(self) -> float:
        """Fraction of attention's weights that are dropped."""
        if self.attention_dropout is None:
            return self.dropout
        return self.attention_dropout

    @property
    def drops(self) -> bool:
        return self.dropout > 0 or self.weights_dropout > 0

    def problems(self) -> list[str]:
        """What is wrong with these sizes on any layout, one sentence each. Empty if they fit together."""
        problems = below_one(self, ("dim", "n_layers", "n_heads", "vocab_size", "block_size"))
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                problems.append(f"{name} is {value}: it must be at least 0, and below 1")
        if not 0 < self.norm_eps < math.inf:
            problems.append(f"norm_eps is {self.norm_eps}: it must be above 0, and finite")
        if not problems and self.dim % self.n_heads:
            problems.append(f"dim {self.dim} is not divisible by n_heads {self.n_heads}")
        return problems


# gpt2 has nanoGPT's defaults, with GPT-2's vocabulary (50,257) rounded up. shakespeare is nanoGPT's
# config/train_shakespeare_char.py, and shakespeare-cpu what its README changes for a CPU. A text may have another
# vocabulary.
PRESETS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(),
    "shakespeare": GPTConfig(
        dim=384,
        n_layers=6,
        n_heads=6,
        vocab_size=65,
        block_size=256,
        dropout=0.2,
    ),
    "shakespeare-cpu": GPTConfig(
        dim=128,
        n_layers=4,
        n_heads=4,
        vocab_size=65,
        block_size=64,
    ),
}


class GPTAttention(nn.Module):
    """Causal attention.

    Attributes:
        attention_fn: as in `mmm.models.llama.model.Attention`. It is not called while weights are dropped: attention is
            then computed here, with all scores, because no kernel can be told which of them to drop.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_fn: Callable[..., Tensor] = causal_attention
        self.head_dim = config.head_dim
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.dropout = Dropout(config.weights_dropout, layer)

    def forward(self, x: Tensor, documents: Documents | None = None, sample_keys: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        # -1: under tensor parallelism a rank has only some of the heads. (batch, seq, local heads, 3, head_dim)
        qkv = self.wqkv(x).view(batch, seq, -1, 3, self.head_dim)
        # each (batch, local heads, seq, head_dim)
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv.unbind(3))
        if self.training and self.dropout.p > 0:
            out = self._dropping(q, k, v, documents, sample_keys)
        elif documents is None:
            out = self.attention_fn(q, k, v)
        else:
            out = self.attention_fn(q, k, v, documents)
        # (batch, local heads, seq, head_dim) → (batch, seq, local heads · head_dim)
        out = out.transpose(1, 2).reshape(batch, seq, -1)
        return self.wo(out)

    def _dropping(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        sample_keys: Tensor | None,
    ) -> Tensor:
        """Attention whose weights are dropped, (batch, local heads, seq, head_dim) in and out."""
        place = torch.arange(q.shape[2], device=q.device)
        # A token does not see the tokens after it. (queries, keys)
        hidden = place > place[:, None]
        if documents is not None:
            # Nor those before its document. (batch, 1, queries, keys)
            hidden = hidden | (place < documents.start_of_token[:, None, :, None])
        # (batch, local heads, queries, keys)
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        scores = scores.masked_fill(hidden, -math.inf)
        # The softmax is computed in float32 or wider.
        weight = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(v.dtype)
        return self.dropout(weight, sample_keys) @ v


class GPTFeedForward(nn.Module):
    """``w2(gelu(w1 x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.approximation = "tanh" if config.tanh_gelu else "none"
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=config.bias)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, seq, hidden_dim), then (batch, seq, dim)
        hidden = F.gelu(self.w1(x), approximate=self.approximation)
        return self.w2(hidden)


class GPTBlock(nn.Module):
    """Pre-norm block, (batch, seq, dim) in and out.

    Args:
        layer_index: index of the layer in the full model. It decides what the layer's dropouts drop.
    """

    def __init__(self, config: GPTConfig, layer_index: int) -> None:
        super().__init__()
        # Each dropout of the model has a number: 0 is the embedding's, and each layer has three.
        first = 3 * layer_index + 1
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.attention = GPTAttention(config, first)
        self.dropout1 = Dropout(config.dropout, first + 1)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.feed_forward = GPTFeedForward(config)
        self.dropout2 = Dropout(config.dropout, first + 2)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Documents | None,
        sample_keys: Tensor | None,
    ) -> Tensor:
        added = self.attention(self.attention_norm(x), documents=documents, sample_keys=sample_keys)
        x = x + self.dropout1(added, sample_keys, positions)
        return x + self.dropout2(self.feed_forward(self.ffn_norm(x)), sample_keys, positions)


class GPT(nn.Module):
    """Tokens (batch, seq) int64 to logits (batch, seq, vocab_size).

    A pipeline stage is this class with both embeddings, some ``layers``, or ``norm`` and ``output`` set to None or
    removed: it then takes, or returns, (batch, seq, dim).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        problems = config.problems()
        if problems:
            raise ValueError("; ".join(problems))
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
        documents: Documents | None = None,
        sample_keys: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            tokens: (batch, seq) int64, or hidden states (batch, seq, dim) where the embeddings are missing.
            positions: (seq,) int64, the global position of each token, below ``block_size``; 0, 1, 2, … if None.
            documents: of the full sequences, as in `mmm.models.llama.model.Transformer`: positions begin anew with each
                document.
            sample_keys: (batch,) int64, for dropout (`mmm.nn.dropout.sample_keys`).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        h = tokens
        if self.tok_embeddings is not None and self.pos_embeddings is not None:
            # (1, seq), or (batch, seq) with documents
            in_document = positions[None] if documents is None else positions - documents.start_of_token[:, positions]
            # (batch, seq, dim)
            h = self.tok_embeddings(tokens) + self.pos_embeddings(in_document)
            h = self.dropout(h, sample_keys, positions)
        for layer in self.layers.values():
            h = layer(h, positions, documents, sample_keys)
        if self.norm is not None:
            h = self.norm(h)
        if self.output is not None:
            # (batch, seq, vocab_size)
            h = self.output(h)
        return h

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn: GPT-2's rule.

        Norms are 1 and biases 0. All else is normal with standard deviation 0.02, but 0.02 / sqrt(2 · n_layers) for
        matrices that write into the residual stream, so that it does not grow with the depth.

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
