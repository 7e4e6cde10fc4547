"""The Transformer with routed experts, small: what expert parallel is tried on (`mmm.models.experts`)."""

from __future__ import annotations

import torch
from torch import nn

from mmm.models.experts import MixtureOfExperts
from mmm.models.transformer import Transformer, TransformerConfig, parity_batch

__all__ = ["parity_after_step", "parity_batch", "parity_model"]
RATE = 1e-3  # as `mmm.parallel.expert.apply.balance_experts` has it


def parity_model() -> Transformer:
    """8 experts in each of 2 layers: 4 parts to cut into stages."""
    config = TransformerConfig(
        dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=64, vocab_size=96, n_experts=8, expert_dim=24
    )
    return Transformer(config)


@torch.no_grad()
def parity_after_step(model: nn.Module) -> None:
    """Make experts that had more than their share of the tokens less likely, and the others more; on one device."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            load = layer.tokens_per_expert
            assert load is not None
            layer.expert_bias += RATE * (load.sum() - load * len(load)).sign()
            layer.tokens_per_expert = None
