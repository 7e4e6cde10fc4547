"""Attention of all places of a field to all others."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmm.parallel.cp.space.split import Split
from mmm.parallel.cp.space.strips import whole


def self_attention(split: Split, module: Any, forward: Any, query: Tensor, *others: Tensor, **options: Any) -> Any:
    """nn.MultiheadAttention of a field to itself: queries of this rank's places, keys and values of all.

    Each rank projects the keys and values of the whole field.

    Args:
        query: (batch, places, channels) or (places, batch, channels), this rank's.
    """
    keys = query
    for axis in split.axes(module, query, 0):
        keys = axis.take(keys, whole(axis.have))
    return forward(query, keys, keys, **options)


def attention_problem(
    module: Any, ranks: int, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> str:
    """Why an attention is refused; empty if it is not."""
    if key is not query or value is not query:
        return "keys or values that are not the queries: only self-attention"
    # These are no masks.
    options.update(need_weights=None, average_attn_weights=None)
    if args or any(option is not None for option in options.values()):
        return "a mask: leave it out"
    return ""
