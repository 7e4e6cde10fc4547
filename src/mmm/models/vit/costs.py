"""What a ViT costs a rank. Memory is counted as in `mmm.models.llama.costs`, but tp does not shard the activations
between the matrices."""

from __future__ import annotations

from mmm.models.costs import STATISTIC, Costs, Held, KeptActivations, Setting
from mmm.models.vit.model import ViTConfig
from mmm.parallel.collective_bytes import factor


class ViTCosts(Costs):
    """Of `mmm.models.vit.model.ViT`."""

    def kept(self, config: ViTConfig, setting: Setting) -> KeptActivations:
        c, residual, tp = setting.compute, setting.residual, setting.layout.tp
        d, hidden = config.dim, config.hidden_dim / tp
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

    def pairs(self, config: ViTConfig) -> int:
        return 2

    def sent_over_tp(self, config: ViTConfig, setting: Setting, held: Held) -> float:
        # An all-reduce after rows, and one in backward before columns.
        both = setting.residual + setting.compute
        return 4 * held.layers * factor("all_gather", setting.layout.tp) * setting.tokens * config.dim * both
