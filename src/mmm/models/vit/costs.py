"""What a ViT costs a rank.

Memory is counted as in `mmm.models.llama.costs`, except that norms are kernels of their own, and that tp does not shard
the activations between the matrices.
"""

from __future__ import annotations

from mmm.models.costs import STATISTIC, Costs, Held, KeptActivations, Setting
from mmm.models.vit.model import ViTConfig
from mmm.parallel.collective_bytes import factor


class ViTCosts(Costs):
    """Costs of `mmm.models.vit.model.ViT`."""

    def kept(self, config: ViTConfig, setting: Setting) -> KeptActivations:
        # Bytes of an element: in products, and in the residual stream. Elements of a patch: in the residual stream, and
        # on this rank in the MLP.
        compute = setting.compute
        residual = setting.residual
        tp = setting.layout.tp
        dim = config.dim
        hidden = config.hidden_dim / tp
        heads = config.n_heads / tp

        # q, k, v and the output; and the statistics of the softmax.
        attention = 4 * compute * dim / tp + STATISTIC * heads
        if config.attention == "native":
            # A row of scores for each head, and their softmax, in float32 at least.
            attention += 2 * max(compute, STATISTIC) * heads * config.patches
        # The input of a norm, and its mean and deviation.
        norm = residual * dim + 2 * STATISTIC
        none = 2 * (norm + compute * dim) + attention + 2 * compute * hidden

        boundary = residual * dim
        # Outputs of products: wq wk wv, wo, fc1, fc2; and of attention.
        selective = (
            boundary + 3 * compute * dim / tp + compute * dim + compute * hidden + compute * dim + compute * dim / tp
        )
        return KeptActivations(
            none=none,
            selective=min(selective, none),
            full=boundary,
            working=2 * compute * hidden + 2 * compute * dim,
            boundary=boundary,
            head=norm + compute * dim,
            traffic=compute * (10 * dim + 2 * hidden),
        )

    def pairs(self, config: ViTConfig) -> int:
        # Attention, and the MLP.
        return 2

    def sent_over_tp(self, config: ViTConfig, setting: Setting, held: Held) -> float:
        # In each pair: an all-reduce after the rows in forward, and one before the columns in backward. An all-reduce
        # is two all-gathers.
        bytes_per_element = setting.residual + setting.compute
        all_gather = factor("all_gather", setting.layout.tp)
        activations = 2 * setting.tokens * config.dim * bytes_per_element
        # One rank adds the bias of the rows, so an all-reduce gives its gradient to the others.
        bias = 2 * config.dim * setting.residual
        return self.pairs(config) * held.layers * all_gather * (activations + bias)
