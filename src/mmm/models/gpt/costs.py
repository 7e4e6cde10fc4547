"""What a GPT costs a rank.

Memory is counted as in `mmm.models.llama.costs`, except that norms are kernels of their own. Dropout keeps one byte for
each element that it may drop. Where attention's weights are dropped, no kernel computes attention: all weights are then
kept, before and after dropout.
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
from mmm.models.gpt.model import GPTConfig
from mmm.parallel.collective_bytes import factor


class GPTCosts(Costs):
    """Costs of `mmm.models.gpt.model.GPT`."""

    def kept(self, config: GPTConfig, setting: Setting) -> KeptActivations:
        # Bytes of an element: in products, and in the residual stream. Elements of a token: in the residual stream, and
        # on this rank in the feed-forward layer.
        compute = setting.compute
        residual = setting.residual
        tp = setting.layout.tp
        dim = config.dim
        hidden = config.hidden_dim / tp
        heads = config.n_heads / tp

        # q, k, v and the output; and the statistics of the softmax.
        attention = 4 * compute * dim / tp + STATISTIC * heads
        if config.weights_dropout:
            wide = max(compute, STATISTIC)
            # A row of weights for each head: after the softmax in float32, after dropout, and what was dropped; and in
            # half precision also before dropout. The kernel's statistics are not there.
            bytes_per_weight = wide + compute + 1 + (wide != compute) * compute
            attention += heads * (setting.sequence * bytes_per_weight - STATISTIC)
        # Two dropouts of a block, a byte for each element.
        dropped = 2 * dim / tp * (config.dropout > 0)
        # The input of a norm, and its mean and deviation.
        norm = (residual * dim + 2 * STATISTIC) / tp
        none = 2 * (norm + compute * dim) + attention + 2 * compute * hidden + dropped

        boundary = residual * dim / tp
        # Outputs of products: wqkv and attention, wo, w1, w2.
        products = boundary + compute * 4 * dim / tp + compute * dim + compute * hidden + compute * dim
        selective = products + STATISTIC * heads
        return KeptActivations(
            none=none,
            selective=min(selective, none),
            full=boundary,
            working=2 * compute * hidden + 2 * compute * dim,
            boundary=boundary,
            head=norm + compute * dim,
            traffic=compute * (10 * dim / tp + 2 * hidden),
        )

    def pairs(self, config: GPTConfig) -> int:
        # Attention, and the feed-forward layer.
        return 2

    def sent_over_tp(self, config: GPTConfig, setting: Setting, held: Held) -> float:
        sent = sent_by_pairs(setting, config.dim, held, self.pairs(config), biases=config.bias)
        if held.first:
            # The position embedding reduce-scatters one sequence for each micro-batch, and all-gathers in backward.
            positions = setting.microbatches * setting.sequence / setting.layout.cp
            sent += 2 * factor("all_gather", setting.layout.tp) * positions * config.dim * setting.residual
        return sent

    def sent_over_cp(self, config: GPTConfig, setting: Setting, held: Held) -> dict[str, float]:
        return sent_by_attention(config, setting, held.layers)
