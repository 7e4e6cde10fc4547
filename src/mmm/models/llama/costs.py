"""What a Llama costs a rank, with experts or without.

A layer leaves these in memory for backward, in bytes a token.

Of a block, with d its dim, F its feed-forward width, h and k its heads and key/value heads of size e, and
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
this is; the terms are those of `model.py`. A test compares them with what autograd keeps.
"""

from __future__ import annotations

from mmm.models.costs import STATISTIC, Costs, Held, KeptActivations, Setting, sent_by_attention, sent_by_pairs
from mmm.models.llama.model import TransformerConfig
from mmm.parallel.collective_bytes import factor


class TransformerCosts(Costs):
    """Of `mmm.models.llama.model.Transformer`."""

    def kept(self, config: TransformerConfig, setting: Setting) -> KeptActivations:
        d, e, c = config.dim, config.head_dim, setting.compute
        residual, tp = setting.residual, setting.layout.tp
        composite_norm = setting.device == "cpu"  # the norm is made of several operators
        # A window is a mask, which no flash attention on CUDA takes.
        masked = config.window is not None and config.window < setting.sequence
        # Whether attention repeats key/value heads.
        repeats_kv = not (setting.device == "cpu" or (setting.device == "cuda" and c == 2 and not masked))
        heads = config.n_heads / tp
        kv_heads = heads if repeats_kv else max(config.n_kv_heads / tp, 1)
        own_kv = config.n_kv_heads / tp
        norm = d * (2 * max(residual, STATISTIC) if composite_norm else residual) / tp
        attention = c * e * (2 * heads + 2 * kv_heads) + STATISTIC * heads
        routed = bool(config.n_experts)
        if routed:
            wide, k, f = max(c, STATISTIC), config.top_k, config.expert_hidden_dim
            # The router's input in float32, its scores, choices and their order (int64); the sorted rows, the experts,
            # and their output before and after it is weighted.
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
            # Cosine and sine, of queries and of keys, half a head each; a row of the mask.
            a_position=8.0 * e + c * setting.sequence * masked,
        )

    def pairs(self, config: TransformerConfig) -> int:
        return 1 if config.n_experts else 2  # experts are not sharded over tp

    def sent_over_tp(self, config: TransformerConfig, setting: Setting, held: Held) -> float:
        return sent_by_pairs(setting, config.dim, held, self.pairs(config))

    def sent_over_cp(self, config: TransformerConfig, setting: Setting, held: Held) -> dict[str, float]:
        return sent_by_attention(config, setting, held.layers)

    def sent_over_ep(self, config: TransformerConfig, setting: Setting, held: Held) -> float:
        sent = setting.tokens / setting.layout.tp * config.top_k * config.dim * setting.compute
        return 4 * held.layers * factor("all_to_all", setting.layout.ep) * sent
