"""What a Qwen3 costs a rank: what a Llama does, and its norms over heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.models.costs import STATISTIC, Held, KeptActivations, Setting
from mmm.models.llama.costs import TransformerCosts
from mmm.parallel.collective_bytes import factor


class Qwen3Costs(TransformerCosts):
    """Of `mmm.models.qwen3.model.Qwen3`."""

    def kept(self, config: Any, setting: Setting) -> KeptActivations:
        kept = super().kept(config, setting)
        tp, width = setting.layout.tp, setting.compute
        heads = config.n_heads / tp + max(config.n_kv_heads / tp, 1)
        # The input of a norm; where the norm is no kernel of its own (CPU) also its normalized input, both float32.
        an_element = 2 * max(width, STATISTIC) if setting.device == "cpu" else width
        norms = heads * (config.head_dim * an_element + STATISTIC)
        return replace(
            kept,
            none=kept.none + norms,
            selective=min(kept.selective, kept.none + norms),
            traffic=kept.traffic + 4 * width * heads * config.head_dim,
        )

    def sent_over_tp(self, config: Any, setting: Setting, held: Held) -> float:
        # The gradients of both norms are summed over the ranks, which have different heads.
        norms = 2 * held.layers * config.head_dim * setting.residual
        summed = factor("all_reduce", setting.layout.tp) * norms
        return super().sent_over_tp(config, setting, held) + summed
