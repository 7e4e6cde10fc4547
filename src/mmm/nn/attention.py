"""Causal attention, the one place where tokens of a sequence meet. Context parallelism replaces it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cuda_has_flash(q: Tensor) -> bool:
    """Whether PyTorch has flash attention for these heads on their device.

    It has on CUDA, for compute capability 8.0 and higher (so not on a V100), in half precision, for a head_dim up to
    256.

    Args:
        q: (…, head_dim).
    """
    if q.device.type != "cuda":
        return False
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if not is_half or q.shape[-1] > 256:
        return False
    properties = torch.cuda.get_device_properties(q.device)
    return properties.major >= 8


def takes_grouped_heads(q: Tensor) -> bool:
    """Whether PyTorch has a fused kernel, with gradients, for fewer heads of k and v than of q.

    On CUDA only flash attention is one; on CPU there is one; on XPU only without gradients. Elsewhere ``enable_gqa``
    repeats the heads and computes all scores, and it is better to repeat heads for a fused kernel.

    Args:
        q: (batch, heads, seq, head_dim).
    """
    return q.device.type == "cpu" or cuda_has_flash(q)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Every token attends to itself and to all tokens before it, in its document where there are several.

    Args:
        q: (batch, heads, seq, head_dim).
        k, v: (batch, kv heads, seq, head_dim); each head serves heads / kv heads heads of q.
        document_starts: (batch, seq) int64: the position in the sequence where each token's document begins. It makes a
            mask of (batch, 1, seq, seq), which PyTorch's kernel for memory-efficient attention takes on CUDA and its
            fused kernel on CPU; flash attention does not.
        window: how many tokens a token attends to at most, itself the last of them. It makes a mask, of (seq, seq).

    Returns:
        (batch, heads, seq, head_dim).
    """
    _, heads, seq, _ = q.shape
    n_rep = heads // k.shape[1]
    has_window = window is not None and window < seq
    masked = document_starts is not None or has_window
    # Masks rule out flash attention, the only kernel on CUDA that takes grouped heads.
    grouped = False
    if n_rep > 1 and (not masked or q.device.type == "cpu"):
        grouped = takes_grouped_heads(q)
    if n_rep > 1 and not grouped:
        # (batch, heads, seq, head_dim)
        k = k.repeat_interleave(n_rep, dim=1)
        v = v.repeat_interleave(n_rep, dim=1)
    if not masked:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    keys = torch.arange(seq, device=q.device)
    visible = visible_keys(keys, 0, window)
    if document_starts is not None:
        # (batch, queries, keys)
        in_document = keys >= document_starts[..., None]
        # (batch, 1, queries, keys): the same for all heads.
        visible = (visible & in_document)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)


def visible_keys(keys: Tensor, first_query: int, window: int | None) -> Tensor:
    """Which keys each query sees: itself and those before it.

    Args:
        keys: (keys,) int64, their positions in the sequence: 0, 1, …
        first_query: the position of the first query. The last query is at the last key.
        window: how many keys a query sees at most, itself the last of them. None: all before it.

    Returns:
        (queries, keys) bool.
    """
    queries = keys[first_query:, None]
    visible = keys <= queries
    if window is not None:
        in_window = keys > queries - window
        visible = visible & in_window
    return visible
