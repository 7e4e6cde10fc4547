"""Attention of queries to one block of keys, in a form that can be merged with that of other blocks.

Softmax over all keys follows from softmaxes over blocks of them if each block returns, besides its output, the
logarithm of its sum of exponentials (``lse``)::

    out_1, lse_1    of keys block 1         lse = log(exp(lse_1) + exp(lse_2))
    out_2, lse_2    of keys block 2         out = out_1 · exp(lse_1 - lse) + out_2 · exp(lse_2 - lse)

Backward needs no merging: given ``out`` and ``lse`` of all keys, the gradients of the blocks simply add up.

Kernels: on CPU the fused one, in any dtype; on CUDA flash attention, in bf16 and fp16 with a head_dim that is a
multiple of 8 up to 256, where the device has it (a V100 does not); elsewhere matrix products, of `TILE` queries and
`TILE` keys at a time: the scores of a block, (queries, keys), never exist. All take k and v with fewer heads than q,
each of which serves several heads of q.

Where a sequence has several documents, a query sees the keys of a block from its document's first one on. None of the
fused kernels returns the ``lse`` of that on all devices: this, too, is done in tiles.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mmm.nn.attention import cuda_has_flash
from mmm.torch_private.operators import cpu_attention, cpu_attention_backward, flash_attention, flash_attention_backward

TILE = 512  # tokens


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, first_key: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of queries to one block of keys.

    Args:
        q: (batch, heads, queries, head_dim). k, v: (batch, kv heads, keys, head_dim).
        causal: query i sees keys 0 … i (queries = keys); otherwise every query sees every key.
        first_key: (batch, queries) int64, from which key on each query sees any; None: from 0 on.

    Returns:
        The output, (batch, heads, queries, head_dim) in the dtype of q, and ``lse``, (batch, heads, queries), float32
        at least; 0 and -inf where a query sees no key.
    """
    if first_key is not None:
        return tiled_forward(q, k, v, causal, first_key)
    if _has_cpu_kernel(q):
        return cpu_attention(q, k, v, 0.0, causal)
    if _has_flash(q):
        return flash_attention(q, k, v, 0.0, causal)[:2]
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
    """What one block of keys adds to the gradients of q, and the gradients of its k and v from these queries.

    Args:
        gradient: of `out`. out, lse: merged from *all* blocks. q, k, v, causal, first_key: as for `block_forward`.
    """
    if first_key is not None:
        return tiled_backward(gradient, q, k, v, out, lse, causal, first_key)
    if _has_cpu_kernel(q):
        return cpu_attention_backward(gradient, q, k, v, out, lse, 0.0, causal)
    if _has_flash(q):
        # The state of dropout, which is off.
        state, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        lengths = (None, None, q.shape[2], k.shape[2])
        return flash_attention_backward(gradient, q, k, v, out, lse, *lengths, 0.0, causal, state, offset)
    return tiled_backward(gradient, q, k, v, out, lse, causal)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of `out` and to one block more. An `lse` of -inf means no keys yet."""
    total = torch.logaddexp(lse, block_lse)
    finite = _finite(total)
    old, new = (torch.exp(part - finite)[..., None] for part in (lse, block_lse))  # (batch, heads, queries, 1)
    return out * old + block_out * new, total


def _finite(lse: Tensor) -> Tensor:
    """0 instead of -inf, of queries without keys, whose scores are all -inf as well."""
    return lse.masked_fill(lse == -math.inf, 0)


def _has_cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _has_flash(q: Tensor) -> bool:
    return q.shape[-1] % 8 == 0 and cuda_has_flash(q)  # the operator itself does not pad heads


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, first_key: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`block_forward` in matrix products."""
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q, dtype=accum_dtype), q.new_full(q.shape[:-1], -math.inf, dtype=accum_dtype)
    heads = k.shape[1]
    for rows, keys, diagonal in _tiles(q.shape[2], k.shape[2], causal):
        tile_q, tile_k = _by_kv_head(q[:, :, rows].to(accum_dtype), heads), k[:, :, keys].to(accum_dtype)
        scores = _scores(tile_q, tile_k, rows, keys, diagonal, first_key)
        tile_lse = scores.logsumexp(-1, keepdim=True)  # (batch, kv heads, group · tile, 1)
        tile_out = scores.sub_(_finite(tile_lse)).exp_() @ v[:, :, keys].to(accum_dtype)
        parts = (_by_head(tile_out, q.shape[1]), _by_head(tile_lse, q.shape[1]).squeeze(-1))
        out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *parts)
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
    """`block_backward` in matrix products."""
    accum_dtype, heads = lse.dtype, k.shape[1]
    dq, dk, dv = (torch.zeros_like(t, dtype=accum_dtype) for t in (q, k, v))
    inner = (gradient.to(accum_dtype) * out.to(accum_dtype)).sum(-1, keepdim=True)  # (batch, heads, queries, 1)
    for rows, keys, diagonal in _tiles(q.shape[2], k.shape[2], causal):
        of_rows = (t[:, :, rows].to(accum_dtype) for t in (q, gradient, inner, lse[..., None]))
        tile_q, tile_gradient, tile_inner, tile_lse = (_by_kv_head(t, heads) for t in of_rows)
        tile_k, tile_v = k[:, :, keys].to(accum_dtype), v[:, :, keys].to(accum_dtype)
        weights = _scores(tile_q, tile_k, rows, keys, diagonal, first_key).sub_(tile_lse).exp_()
        dv[:, :, keys] += weights.mT @ tile_gradient
        through = (tile_gradient @ tile_v.mT).sub_(tile_inner)
        d_scores = weights.mul_(through).div_(math.sqrt(q.shape[-1]))  # (batch, kv heads, group · tile, tile)
        dq[:, :, rows] += _by_head(d_scores @ tile_k, q.shape[1])
        dk[:, :, keys] += d_scores.mT @ tile_q
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _tiles(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Queries and keys of each tile, and whether it is on the diagonal: where causal, those above it are left out."""
    for row in range(0, queries, TILE):
        for key in range(0, row + 1 if causal else keys, TILE):
            yield slice(row, min(row + TILE, queries)), slice(key, min(key + TILE, keys)), causal and row == key


def _by_kv_head(t: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, rows, n) to (batch, kv heads, group · rows, n)."""
    return t.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _by_head(t: Tensor, heads: int) -> Tensor:
    """Inverse of `_by_kv_head`."""
    return t.unflatten(2, (heads // t.shape[1], -1)).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, diagonal: bool, first_key: Tensor | None) -> Tensor:
    """(batch, kv heads, group · rows, keys); -inf where a query does not see a key: on the diagonal a later one,
    everywhere one before `first_key`."""
    scores = (q @ k.mT).div_(math.sqrt(q.shape[-1]))
    group = q.shape[2] // (rows.stop - rows.start)
    if diagonal:
        tile = rows.stop - rows.start
        later = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later.repeat(group, 1), -math.inf)
    if first_key is not None:
        key_positions = torch.arange(keys.start, keys.stop, device=q.device)
        earlier = key_positions < first_key[:, None, rows, None]  # (batch, 1, rows, keys)
        scores.masked_fill_(earlier.repeat(1, 1, group, 1), -math.inf)
    return scores
