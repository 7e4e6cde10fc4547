"""What a Llama costs a rank, with experts or without.

A layer leaves these tensors in memory for backward, in bytes per token. In the table, d is the width of the residual
stream, F the width of the feed-forward layer, h and k the number of heads and key/value heads, e the width of a head,
and c the bytes of an element in matrix products. Each line is divided by tp, except where it says full: what tp
gathers stays gathered::

    input of a norm, twice      2 c d           the residual stream. Where the norm is not one kernel (CPU), its
                                                normalized input is kept as well, both in float32 at least
    its output, twice           2 c d   full    the input of the products that follow
    q, k, v, attention's output 2 c h e + 2 c k e
    feed-forward                4 c F           both products, SiLU, the input of the last product
    statistics                  4 h + 8         of attention, and of both norms: float32

Packed documents with `--document_mask` keep no mask where each is computed by itself (`mmm.nn.attention`). On a CPU
their outputs are joined, and attention's output is kept twice: c h e more.

Full checkpointing keeps only the block's input. Selective checkpointing keeps the outputs of products and of attention
(under tp the output of a row-wise product is full), and the block's input. With DDP, ZeRO-1 and ZeRO-2 in mixed
precision the residual stream is in the dtype of the weights (autocast).

Source: the method is that of Korthikanti et al., "Reducing activation recomputation in large Transformer models", 2022,
section 4.1; the terms are those of `model.py`. A test compares them with what autograd keeps.
"""

from __future__ import annotations

from mmm.models.costs import (
    STATISTIC,
    Costs,
    Held,
    KeptActivations,
    Setting,
    sent_by_attention,
    sent_by_pairs,
)
from mmm.models.llama.model import TransformerConfig
from mmm.parallel.collective_bytes import factor


class TransformerCosts(Costs):
    """Costs of `mmm.models.llama.model.Transformer`."""

    def kept(self, config: TransformerConfig, setting: Setting) -> KeptActivations:
        # Elements of a token: of the residual stream, and of a head. Bytes of an element: in products, and in the
        # residual stream.
        dim = config.dim
        head_dim = config.head_dim
        compute = setting.compute
        residual = setting.residual
        tp = setting.layout.tp

        # A window needs a mask, which flash attention on CUDA does not take.
        masked = config.window is not None and config.window < setting.sequence
        # Kernels that take grouped heads as they are: all on a CPU, and flash attention on CUDA. Others get key/value
        # heads that are repeated for each query head, and keep those.
        flash = setting.device == "cuda" and compute == 2 and not masked
        grouped = setting.device == "cpu" or flash
        heads = config.n_heads / tp
        own_kv_heads = config.n_kv_heads / tp
        kept_kv_heads = heads
        if grouped:
            kept_kv_heads = max(own_kv_heads, 1)
        # q and the output; k and v; and the statistics of the softmax.
        attention = compute * head_dim * (2 * heads + 2 * kept_kv_heads) + STATISTIC * heads

        norm = dim * residual / tp
        if setting.device == "cpu":
            # Here the norm is made of several operators, which also keep its normalized input.
            norm = dim * (2 * max(residual, STATISTIC)) / tp

        if config.n_experts:
            feed_forward, hidden = self.kept_by_experts(config, setting)
            # The sequence is gathered for attention, and stays sharded for the experts.
            normed = compute * dim * (1 + 1 / tp)
        else:
            feed_forward = 4 * compute * config.hidden_dim / tp
            hidden = config.hidden_dim / tp
            normed = 2 * compute * dim
        statistics = 2 * STATISTIC / tp
        none = 2 * norm + normed + attention + feed_forward + statistics

        # Outputs of products: wq wk wv, wo, w1 w3, w2.
        products = (
            compute * head_dim * (heads + 2 * own_kv_heads) + compute * dim + 2 * compute * hidden + compute * dim
        )
        boundary = dim * residual / tp
        # The block's input, the products, and the output of attention with its statistics.
        selective = boundary + products + compute * head_dim * heads + STATISTIC * heads

        # What element-wise kernels read and write: norms, residuals and casts; rotary positions, which are computed in
        # float32 or wider; SiLU and the product with it.
        rotary_bytes = 40
        if compute == 2:
            rotary_bytes = 44
        traffic = compute * dim * 10 / tp + rotary_bytes * head_dim * (heads + own_kv_heads) + 5 * compute * hidden
        return KeptActivations(
            none=none,
            selective=min(selective, none),
            full=boundary,
            working=2 * compute * hidden + 2 * compute * dim,
            boundary=boundary,
            head=norm + compute * dim + STATISTIC / tp,
            traffic=traffic,
            # Cosine and sine, for queries and for keys, half a head each in float32; and a row of the mask.
            a_position=8.0 * head_dim + compute * setting.sequence * masked,
        )

    def kept_by_experts(self, config: TransformerConfig, setting: Setting) -> tuple[float, float]:
        """Bytes per token that a layer of experts keeps, and hidden elements per token.

        The tokens of a rank are sharded over tp; the experts are not.
        """
        dim = config.dim
        top_k = config.top_k
        width = config.expert_hidden_dim
        compute = setting.compute
        tp = setting.layout.tp
        wide = max(compute, STATISTIC)
        # The router's input in float32, if it is a copy; for each expert a score and an index (int64); for each choice
        # its weight, expert and place in the order.
        routing = (wide * dim * (wide != compute) + (wide + 8) * config.n_experts + 40 * top_k) / tp
        # For each choice: the sorted row, and the output before it is weighted; and four tensors as wide as the expert.
        experts = top_k * (compute * dim * 2 + 4 * compute * width) / tp
        return routing + experts, top_k * width / tp

    def pairs(self, config: TransformerConfig) -> int:
        # Attention, and the feed-forward layer. Experts are not sharded over tp.
        if config.n_experts:
            return 1
        return 2

    def sent_over_tp(self, config: TransformerConfig, setting: Setting, held: Held) -> float:
        sent = sent_by_pairs(setting, config.dim, held, self.pairs(config))
        tp = setting.layout.tp
        if config.n_kv_heads % tp:
            # Ranks share a head: keys and values are all-gathered, and their gradients reduce-scattered.
            heads = setting.tokens * config.n_kv_heads * config.head_dim * setting.compute
            sent += 4 * held.layers * factor("all_gather", tp) * heads
        return sent

    def sent_over_cp(self, config: TransformerConfig, setting: Setting, held: Held) -> dict[str, float]:
        return sent_by_attention(config, setting, held.layers)

    def sent_over_ep(self, config: TransformerConfig, setting: Setting, held: Held) -> float:
        # To the experts and back, in forward and in backward: four all-to-alls of top_k rows for each token.
        sent = setting.tokens / setting.layout.tp * config.top_k * config.dim * setting.compute
        return 4 * held.layers * factor("all_to_all", setting.layout.ep) * sent
