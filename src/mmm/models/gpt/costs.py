"""What a GPT costs a rank. Memory is counted as in `mmm.models.llama.costs`, but norms are kernels of their own.

Dropout keeps a byte for each element that it may drop. That of attention's weights, which are then no kernel's own,
also keeps them before and after it.
"""

from __future__ import annotations

from mmm.models.costs import STATISTIC, Costs, Held, KeptActivations, Setting, sent_by_attention, sent_by_pairs
from mmm.models.gpt.model import GPTConfig
from mmm.parallel.collective_bytes import factor


class GPTCosts(Costs):
    """Of `mmm.models.gpt.model.GPT`."""

    def kept(self, config: GPTConfig, setting: Setting) -> KeptActivations:
        c, residual, tp = setting.compute, setting.residual, setting.layout.tp
        d, hidden = config.dim, config.hidden_dim / tp
        heads = config.n_heads / tp
        attention = 4 * c * d / tp + STATISTIC * heads
        if config.weights_dropout:
            wide = max(c, STATISTIC)
            attention += heads * (setting.sequence * (wide + c + 1 + (wide != c) * c) - STATISTIC)
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

    def pairs(self, config: GPTConfig) -> int:
        return 2

    def sent_over_tp(self, config: GPTConfig, setting: Setting, held: Held) -> float:
        sent = sent_by_pairs(setting, config.dim, held, self.pairs(config), biases=config.bias)
        if held.first:  # the positions of one sequence, as tokens, for each micro-batch
            positions = setting.microbatches * setting.sequence / setting.layout.cp
            sent += 2 * factor("all_gather", setting.layout.tp) * positions * config.dim * setting.residual
        return sent

    def sent_over_cp(self, config: GPTConfig, setting: Setting, held: Held) -> dict[str, float]:
        return sent_by_attention(config, setting, held.layers)
