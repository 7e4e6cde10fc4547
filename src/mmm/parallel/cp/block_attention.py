"""Attention of queries to one block of keys, in a form that can be merged with that of other blocks.

Softmax over all keys follows from softmaxes over blocks of them, if each block returns the logarithm of its sum of
exponentials (``lse``) along with its output::

    out_1, lse_1    from block 1 of keys    lse = log(exp(lse_1) + exp(lse_2))
    out_2, lse_2    from block 2 of keys    out = out_1 · exp(lse_1 - lse) + out_2 · exp(lse_2 - lse)

Backward needs no merging: with ``out`` and ``lse`` of all keys, the gradients of the blocks simply add up.

Kernels: on CPU the fused one, in any dtype. On CUDA flash attention, where the device has it (a V100 does not), in bf16
and fp16 with a head_dim that is a multiple of 8 up to 256. Elsewhere matrix products, of `TILE` queries and `TILE` keys
at a time: the scores of a whole block, (queries, keys), never exist. All take k and v with fewer heads than q, each of
which serves several heads of q.

Where a sequence has several documents, a query sees the keys of a block from the first one of its document. None of the
fused kernels returns the ``lse`` of that on all devices, so this is done in tiles too.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mmm.nn.attention import cuda_has_flash
from mmm.torch_private.operators import (
    CPU_ATTENTION_GROUPS_HEADS,
    cpu_attention,
    cpu_attention_backward,
    flash_attention,
    flash_attention_backward,
)

# Tokens on each side of a tile of scores.
TILE = 512


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    first_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to one block of keys.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, kv heads, keys, head_dim).
        causal: True: query i sees keys 0 … i (queries = keys). False: every query sees every key.
        first_key: (batch, queries) int64, the first key that each query sees; None: from 0 on.

    Returns:
        The output, (batch, heads, queries, head_dim) in the dtype of q, and ``lse``, (batch, heads, queries), float32
        at least. They are 0 and -inf where a query sees no key.
    """
    if first_key is not None:
        return tiled_forward(q, k, v, causal, first_key)
    if _has_cpu_kernel(q, k):
        return cpu_attention(q, k, v, 0.0, causal)
    if _has_flash(q):
        # The operator also returns what a backward with dropout would need.
        out, lse = flash_attention(q, k, v, 0.0, causal)[:2]
        return out, lse
    return tiled_forward(q, k, v, causal)


def block_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    first_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block of keys adds to the gradient of q, and the gradients of its k and v from these queries.

    Args:
        gradient: the gradient of `out`, with its shape.
        out, lse: merged from *all* blocks.
        q, k, v, causal, first_key: as for `block_forward`.
    """
    if first_key is not None:
        return tiled_backward(gradient, q, k, v, out, lse, causal, first_key)
    if _has_cpu_kernel(q, k):
        return cpu_attention_backward(gradient, q, k, v, out, lse, 0.0, causal)
    if _has_flash(q):
        # The operator's state of dropout, which is off.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros(0, dtype=torch.uint64, device=q.device)
        queries = q.shape[2]
        keys = k.shape[2]
        # No cumulative lengths: the sequences of a batch are of one length.
        lengths = (None, None, queries, keys)
        return flash_attention_backward(gradient, q, k, v, out, lse, *lengths, 0.0, causal, state, offset)
    return tiled_backward(gradient, q, k, v, out, lse, causal)


def merge(
    out: Tensor,
    lse: Tensor,
    block_out: Tensor,
    block_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of `out` and those of one more block. An `lse` of -inf means that there are no keys yet."""
    total = torch.logaddexp(lse, block_lse)
    finite = _finite(total)
    # (batch, heads, queries, 1): the share of all exponentials that each of the two has.
    weight = torch.exp(lse - finite)[..., None]
    block_weight = torch.exp(block_lse - finite)[..., None]
    merged = out * weight + block_out * block_weight
    return merged, total


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 instead of -inf, for queries without keys: their scores are all -inf, and -inf - -inf is NaN."""
    without_keys = lse == -math.inf
    return lse.masked_fill(without_keys, 0)


def _has_cpu_kernel(q: Tensor, k: Tensor) -> bool:
    is_grouped = q.shape[1] != k.shape[1]
    return q.device.type == "cpu" and (CPU_ATTENTION_GROUPS_HEADS or not is_grouped)


def _has_flash(q: Tensor) -> bool:
    # The operator itself, unlike scaled_dot_product_attention, does not pad heads.
    head_dim = q.shape[-1]
    return head_dim % 8 == 0 and cuda_has_flash(q)


def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    first_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`block_forward` by matrix products."""
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    # (batch, heads, queries, head_dim) and (batch, heads, queries)
    out = torch.zeros_like(q, dtype=accum_dtype)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=accum_dtype)
    _, heads, queries, _ = q.shape
    _, kv_heads, keys, _ = k.shape
    for tile in _tiles(queries, keys, causal):
        # (batch, kv heads, group · rows, head_dim)
        tile_q = _by_kv_head(q[:, :, tile.rows].to(accum_dtype), kv_heads)
        # (batch, kv heads, keys, head_dim)
        tile_k = k[:, :, tile.keys].to(accum_dtype)
        tile_v = v[:, :, tile.keys].to(accum_dtype)
        scores = _scores(tile_q, tile_k, tile, first_key)
        # (batch, kv heads, group · rows, 1)
        tile_lse = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(_finite(tile_lse)).exp_()
        # Back to (batch, heads, rows, …), to merge with the tiles of earlier keys.
        tile_out = _by_head(weights @ tile_v, heads)
        tile_lse = _by_head(tile_lse, heads).squeeze(-1)
        # Views, into which the merged attention is written.
        row_out = out[:, :, tile.rows]
        row_lse = lse[:, :, tile.rows]
        merged_out, merged_lse = merge(row_out, row_lse, tile_out, tile_lse)
        row_out.copy_(merged_out)
        row_lse.copy_(merged_lse)
    return out.to(q.dtype), lse


def tiled_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    first_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` by matrix products."""
    accum_dtype = lse.dtype
    _, heads, queries, head_dim = q.shape
    _, kv_heads, keys, _ = k.shape
    dq = torch.zeros_like(q, dtype=accum_dtype)
    dk = torch.zeros_like(k, dtype=accum_dtype)
    dv = torch.zeros_like(v, dtype=accum_dtype)
    # (batch, heads, queries, 1): gradient · out of each query, which softmax's derivative subtracts.
    products = gradient.to(accum_dtype) * out.to(accum_dtype)
    inner = products.sum(-1, keepdim=True)

    def rows_of(t: Tensor, tile: Tile) -> Tensor:
        """(batch, heads, queries, n) → (batch, kv heads, group · rows, n)."""
        return _by_kv_head(t[:, :, tile.rows].to(accum_dtype), kv_heads)

    for tile in _tiles(queries, keys, causal):
        tile_q = rows_of(q, tile)
        tile_gradient = rows_of(gradient, tile)
        tile_k = k[:, :, tile.keys].to(accum_dtype)
        tile_v = v[:, :, tile.keys].to(accum_dtype)
        scores = _scores(tile_q, tile_k, tile, first_key)
        tile_lse = rows_of(lse[..., None], tile)
        # (batch, kv heads, group · rows, keys): the weights of softmax, recomputed from lse.
        weights = scores.sub_(tile_lse).exp_()
        dv[:, :, tile.keys] += weights.mT @ tile_gradient
        # The derivative of softmax: each weight times (its gradient - their weighted mean).
        d_weights = tile_gradient @ tile_v.mT
        d_weights = d_weights.sub_(rows_of(inner, tile))
        d_scores = weights.mul_(d_weights).div_(math.sqrt(head_dim))
        dq[:, :, tile.rows] += _by_head(d_scores @ tile_k, heads)
        dk[:, :, tile.keys] += d_scores.mT @ tile_q
    dtype = q.dtype
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class Tile(NamedTuple):
    """A tile of the scores of a block.

    Attributes:
        rows: which queries of the block.
        keys: which keys of the block.
        on_diagonal: whether a query does not see the later keys of the tile.
    """

    rows: slice
    keys: slice
    on_diagonal: bool


def _tiles(queries: int, keys: int, causal: bool) -> Iterator[Tile]:
    """The tiles of a block. If causal, those above the diagonal are left out: no query sees their keys."""
    for row in range(0, queries, TILE):
        rows = slice(row, min(row + TILE, queries))
        last_key = row + 1 if causal else keys
        for key in range(0, last_key, TILE):
            tile_keys = slice(key, min(key + TILE, keys))
            yield Tile(rows, tile_keys, on_diagonal=causal and row == key)


def _by_kv_head(t: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, rows, n) → (batch, kv heads, group · rows, n): query heads that share keys become one matrix."""
    return t.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _by_head(t: Tensor, heads: int) -> Tensor:
    """The inverse of `_by_kv_head`: (batch, kv heads, group · rows, n) → (batch, heads, rows, n)."""
    group = heads // t.shape[1]
    return t.unflatten(2, (group, -1)).flatten(1, 2)


def _scores(
    q: Tensor,
    k: Tensor,
    tile: Tile,
    first_key: Tensor | None,
) -> Tensor:
    """The scores of a tile, -inf where a query does not see a key.

    Args:
        q: (batch, kv heads, group · rows, head_dim).
        k: (batch, kv heads, keys, head_dim).
        tile: which queries and keys of the block these are.
        first_key: (batch, queries), as for `block_forward`.

    Returns:
        (batch, kv heads, group · rows, keys).
    """
    head_dim = q.shape[-1]
    scores = (q @ k.mT).div_(math.sqrt(head_dim))
    n_rows = tile.rows.stop - tile.rows.start
    group = q.shape[2] // n_rows
    if tile.on_diagonal:
        # (rows, keys), repeated for each query head of a group.
        later = torch.ones(n_rows, n_rows, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later.repeat(group, 1), -math.inf)
    if first_key is not None:
        key_positions = torch.arange(tile.keys.start, tile.keys.stop, device=q.device)
        # (batch, 1, rows, keys)
        earlier = key_positions < first_key[:, None, tile.rows, None]
        scores.masked_fill_(earlier.repeat(1, 1, group, 1), -math.inf)
    return scores
