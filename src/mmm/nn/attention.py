"""Causal attention, the one place where tokens of a sequence meet; context parallelism replaces it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cuda_has_flash(q: Tensor) -> bool:
    """Whether PyTorch has flash attention for heads such as q's, (…, head_dim), on its device: CUDA from compute
    capability 8.0 on (so not on a V100), in half precision, head_dim up to 256."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_properties(q.device).major >= 8


def takes_grouped_heads(q: Tensor) -> bool:
    """Whether PyTorch trains fewer heads of k and v than of q by a fused kernel. Elsewhere ``enable_gqa`` repeats them
    and computes all scores, and repeated heads with a fused kernel are better.

    CUDA: flash attention alone does. CPU: yes. XPU: without gradients only.

    Args:
        q: (batch, heads, seq, head_dim).
    """
    return q.device.type == "cpu" or cuda_has_flash(q)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Every token attends to itself and to all before it, of its document where there are several.

    Args:
        q: (batch, heads, seq, head_dim). k, v: (batch, kv heads, seq, head_dim); each serves heads / kv heads of q.
        document_starts: (batch, seq) int64: the position in the sequence where each token's document begins. A mask of
            (batch, 1, seq, seq) follows from it, which PyTorch's kernel for memory-efficient attention takes on CUDA
            and its fused one on CPU; flash attention does not.
        window: a token attends to so many at most, itself the last of them. A mask again, of (seq, seq).

    Returns:
        (batch, heads, seq, head_dim).
    """
    n_rep = q.shape[1] // k.shape[1]
    masked = document_starts is not None or (window is not None and window < q.shape[2])
    grouped = n_rep > 1 and takes_grouped_heads(q) and (not masked or q.device.type == "cpu")
    if n_rep > 1 and not grouped:
        k = k.repeat_interleave(n_rep, dim=1)  # (batch, heads, seq, head_dim)
        v = v.repeat_interleave(n_rep, dim=1)
    if not masked:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    place = torch.arange(q.shape[2], device=q.device)
    seen = place <= place[:, None]  # (queries, keys)
    if window is not None:
        seen = seen & (place > place[:, None] - window)
    if document_starts is not None:
        seen = (seen & (place >= document_starts[..., None]))[:, None]  # (batch, 1, queries, keys)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
