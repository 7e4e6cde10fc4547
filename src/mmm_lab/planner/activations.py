"""What a layer leaves in memory for backward, in bytes a token: by formula, from its sizes.

Of a Transformer's block, with d its dim, F its feed-forward width, h and k its heads and key/value heads of size e, and
c the bytes of the dtype of compute (each line over tp, except where it says full: what tp gathers is kept gathered)::

    input of a norm, twice      2 c d           the residual stream. Where the norm is no kernel of its own (CPU) its
                                                normalized input is kept as well, and both at least in float32
    its output, twice           2 c d   full    what the products that follow take
    q, k, v, attention's output 2 c h e + 2 c k e
    feed-forward                4 c F           both products, SiLU, what the last product takes
    statistics                  4 h + 8         of attention, and of both norms: float32

Full checkpointing keeps the block's input alone; selective the outputs of products and of attention (what a row-wise
product returns is full under tp), and the input. With DDP, ZeRO-1 and ZeRO-2 in mixed precision the residual stream
is in the dtype of the weights (autocast).

Sources: Korthikanti et al., "Reducing activation recomputation in large Transformer models", 2022, whose method
this is; the terms are those of `mmm.models`. A test (test_memory.py) compares them with what autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmm.models.gpt.model import GPTConfig
    from mmm.models.llama.model import TransformerConfig
    from mmm.models.vit.model import ViTConfig

STATISTIC = 4  # bytes of a float32


@dataclass(frozen=True)
class KeptActivations:
    """Bytes a token of a rank's layer.

    Attributes:
        none, selective, full: kept by each kind of checkpointing. working: that backward needs on top, at its peak.
        boundary: what passes to the next layer. head: kept by the norm before the output.
        traffic: that element-wise kernels of a forward read and write.
        a_position: bytes a token of the sequence, whatever the batch: rotary angles.
    """

    none: float
    selective: float
    full: float
    working: float
    boundary: float
    head: float
    traffic: float
    a_position: float = 0.0


def transformer_layer(
    config: TransformerConfig, tp: int, compute: int, residual: int, composite_norm: bool, repeats_kv: bool
) -> KeptActivations:
    """Of a block of `mmm.models.llama.model`.

    Args:
        compute, residual: bytes of an element in matrix products, and in the residual stream.
        composite_norm: whether the norm is made of several operators. repeats_kv: whether attention repeats key/value
            heads.
    """
    d, e, c = config.dim, config.head_dim, compute
    heads = config.n_heads / tp
    kv_heads = heads if repeats_kv else max(config.n_kv_heads / tp, 1)
    own_kv = config.n_kv_heads / tp
    norm = d * (2 * max(residual, STATISTIC) if composite_norm else residual) / tp
    attention = c * e * (2 * heads + 2 * kv_heads) + STATISTIC * heads
    routed = bool(config.n_experts)
    if routed:
        wide, k, f = max(c, STATISTIC), config.top_k, config.expert_hidden_dim
        # The router's input in float32, its scores, choices and their order (int64); the sorted rows, the experts, and
        # their output before and after it is weighted.
        feed_forward = (wide * d * (wide != c) + (wide + 8) * config.n_experts + 40 * k) / tp
        feed_forward += k * (c * d * 2 + 4 * c * f) / tp
        normed = c * d * (1 + 1 / tp)
        hidden = k * f / tp
    else:
        feed_forward = 4 * c * config.hidden_dim / tp
        normed = 2 * c * d
        hidden = config.hidden_dim / tp
    statistics = 2 * STATISTIC / tp
    none = 2 * norm + normed + attention + feed_forward + statistics
    products = c * e * (heads + 2 * own_kv) + c * d + 2 * c * hidden + c * d  # wq wk wv, wo, w1 w3, w2
    boundary = d * residual / tp
    selective = min(boundary + products + c * e * heads + STATISTIC * heads, none)
    traffic = c * d * 10 / tp + (44 if c == 2 else 40) * e * (heads + own_kv) + 5 * c * hidden
    return KeptActivations(
        none=none,
        selective=selective,
        full=boundary,
        working=2 * c * hidden + 2 * c * d,
        boundary=boundary,
        head=norm + c * d + STATISTIC / tp,
        traffic=traffic,
        a_position=8.0 * e,  # cosine and sine, of queries and of keys, half a head each
    )


def gpt_layer(config: GPTConfig, tp: int, seq_length: int, compute: int, residual: int) -> KeptActivations:
    """Of a block of `mmm.models.gpt.model`, whose norms are kernels of their own. Arguments as of `transformer_layer`.

    Dropout keeps a byte for each element that it may drop; that of attention's weights, which are then no kernel's own,
    also keeps them before and after it.
    """
    d, c, hidden = config.dim, compute, config.hidden_dim / tp
    heads = config.n_heads / tp
    attention = 4 * c * d / tp + STATISTIC * heads
    if config.weights_dropout:
        wide = max(c, STATISTIC)
        attention += heads * (seq_length * (wide + c + 1 + (wide != c) * c) - STATISTIC)
    dropped = 2 * d / tp * (config.dropout > 0)
    norm = (residual * d + 2 * STATISTIC) / tp
    none = 2 * (norm + c * d) + attention + 2 * c * hidden + dropped
    boundary = residual * d / tp
    selective = min(boundary + c * 4 * d / tp + c * d + c * hidden + c * d + STATISTIC * heads, none)
    return KeptActivations(
        none=none,
        selective=selective,
        full=boundary,
        working=2 * c * hidden + 2 * c * d,
        boundary=boundary,
        head=norm + c * d,
        traffic=c * (10 * d / tp + 2 * hidden),
    )


def vit_layer(config: ViTConfig, tp: int, compute: int, residual: int) -> KeptActivations:
    """Of a block of `mmm.models.vit.model`, whose activations between the matrices tp does not shard."""
    d, c, hidden = config.dim, compute, config.hidden_dim / tp
    heads = config.n_heads / tp
    attention = 4 * c * d / tp + STATISTIC * heads
    if config.attention == "native":  # all scores, and their softmax
        attention += 2 * max(c, STATISTIC) * heads * config.patches
    norm = residual * d + 2 * STATISTIC
    none = 2 * (norm + c * d) + attention + 2 * c * hidden
    selective = min(residual * d + 3 * c * d / tp + c * d + c * hidden + c * d + c * d / tp, none)
    return KeptActivations(
        none=none,
        selective=selective,
        full=residual * d,
        working=2 * c * hidden + 2 * c * d,
        boundary=residual * d,
        head=norm + c * d,
        traffic=c * (10 * d + 2 * hidden),
    )
