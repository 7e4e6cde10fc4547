"""Attention of queries to one block of keys, in a form that can be merged with that of other blocks.

Softmax over all keys follows from softmaxes over blocks of them if each block returns, besides its output, the
logarithm of its sum of exponentials (``lse``)::

    out_1, lse_1    of keys block 1         lse = log(exp(lse_1) + exp(lse_2))
    out_2, lse_2    of keys block 2         out = out_1 · exp(lse_1 - lse) + out_2 · exp(lse_2 - lse)

Backward needs no merging: given ``out`` and ``lse`` of all keys, the gradients of the blocks simply add up.

Kernels: on CPU the fused one, in any dtype; on CUDA flash attention, in bf16 and fp16 with a head_dim that is a
multiple of 8 up to 256; elsewhere matrix products ("math"), which have the (queries, keys) scores of a block in memory.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries to one block of keys.

    Args:
        q: (batch, heads, queries, head_dim). k, v: (batch, heads, keys, head_dim).
        causal: query i sees keys 0 … i (queries = keys); otherwise every query sees every key.

    Returns:
        The output, (batch, heads, queries, head_dim) in the dtype of q, and ``lse``, (batch, heads, queries), float32
        at least.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if _has_flash(q):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return math_forward(q, k, v, causal)


def block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block of keys adds to the gradients of q, and the gradients of its k and v from these queries.

    Args:
        gradient: of `out`. out, lse: merged from *all* blocks. q, k, v, causal: as for `block_forward`.
    """
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, q, k, v, out, lse, 0.0, causal)
    if _has_flash(q):
        # The state of dropout, which is off.
        state, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        lengths = (None, None, q.shape[2], k.shape[2])
        backward = aten._scaled_dot_product_flash_attention_backward
        return backward(gradient, q, k, v, out, lse, *lengths, 0.0, causal, state, offset)
    return math_backward(gradient, q, k, v, out, lse, causal)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of `out` and to one block more. An `lse` of -inf means no keys yet."""
    total = torch.logaddexp(lse, block_lse)
    old, new = (torch.exp(part - total)[..., None] for part in (lse, block_lse))  # (batch, heads, queries, 1)
    return out * old + block_out * new, total


def _has_flash(q: Tensor) -> bool:
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and fits


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(batch, heads, queries, keys); -inf where a query does not see a key."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`block_forward` in matrix products."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q.to(wide), k.to(wide), causal)
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]) @ v.to(wide)).to(q.dtype), lse


def math_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` in matrix products."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dtype = q.dtype
    gradient, q, k, v, out = (t.to(wide) for t in (gradient, q, k, v, out))
    weights = torch.exp(_scores(q, k, causal) - lse[..., None])  # (batch, heads, queries, keys)
    through = gradient @ v.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)
    scores_gradient = weights * through / math.sqrt(q.shape[-1])  # (batch, heads, queries, keys)
    products = (scores_gradient @ k, scores_gradient.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient)
    dq, dk, dv = (product.to(dtype) for product in products)
    return dq, dk, dv
