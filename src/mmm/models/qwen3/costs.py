"""What a Qwen3 costs a rank: what a Llama costs (`mmm.models.llama.costs`), and its norms over heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.models.costs import STATISTIC, Held, KeptActivations, Setting
from mmm.models.llama.costs import TransformerCosts
from mmm.parallel.collective_bytes import factor


class Qwen3Costs(TransformerCosts):
    """Costs of `mmm.models.qwen3.model.Qwen3`."""

    def kept(self, config: Any, setting: Setting) -> KeptActivations:
        llama = super().kept(config, setting)
        tp = setting.layout.tp
        # Bytes of an element in products.
        compute = setting.compute
        heads = config.n_heads / tp + max(config.n_kv_heads / tp, 1)
        # A norm keeps its input. Where it is not one kernel (CPU) it also keeps its normalized input, both in float32.
        bytes_per_element = compute
        if setting.device == "cpu":
            bytes_per_element = 2 * max(compute, STATISTIC)
        norms = heads * (config.head_dim * bytes_per_element + STATISTIC)
        none = llama.none + norms
        return replace(
            llama,
            none=none,
            selective=min(llama.selective, none),
            # What the norms of queries and keys read and write.
            traffic=llama.traffic + 4 * compute * heads * config.head_dim,
        )

    def sent_over_tp(self, config: Any, setting: Setting, held: Held) -> float:
        # Both norms have one weight of head_dim elements. Ranks have different heads, so the gradients are all-reduced.
        norms = 2 * held.layers * config.head_dim * setting.residual
        summed = factor("all_reduce", setting.layout.tp) * norms
        return super().sent_over_tp(config, setting, held) + summed
