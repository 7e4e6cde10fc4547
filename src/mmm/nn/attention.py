"""Causal attention, the one place where tokens of a sequence meet. Context parallelism replaces it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmm.torch_private.module import is_fake
from mmm.torch_private.operators import varlen_attn

# What `varlen_attn` can be told: PyTorch 2.13 has ``enable_gqa``, an earlier version had neither this nor
# ``window_size``, and the first ones had no such function.
VARLEN_ARGUMENTS: frozenset[str] = frozenset()
if varlen_attn is not None:
    VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)


class Documents(NamedTuple):
    """Where the documents of packed sequences begin.

    A named tuple, so that PyTorch finds its tensors among the arguments of a forward: a pipeline splits both into
    micro-batches.

    Attributes:
        start_of_token: (batch, seq) int64: the position in its sequence where each token's document begins.
        starts: (batch, documents) int64: the positions where the documents of each sequence begin, in ascending order.
            A sequence of fewer documents than another has ``seq`` in the remaining places.
    """

    start_of_token: Tensor
    starts: Tensor

    @classmethod
    def of(cls, start_of_token: Tensor) -> Documents:
        """Find the documents, on the host, by where each token's document begins.

        Args:
            start_of_token: (batch, seq) int64. A document that begins before its sequence may have a negative position.

        Raises:
            ValueError: the tokens of a document do not follow one another.
        """
        seq = start_of_token.shape[1]
        places = torch.arange(seq)
        begins = start_of_token.clamp(min=0)
        is_start = begins == places
        # (batch, seq): a token belongs to the last document that has begun.
        last_start = torch.where(is_start, places, 0).cummax(dim=1).values
        # A dry run's tensors have no values to check.
        if not is_fake(start_of_token) and not torch.equal(begins, last_start):
            sequence, token = (begins != last_start).nonzero()[0].tolist()
            raise ValueError(
                f"documents: token {token} of sequence {sequence} is said to belong to the document that begins at "
                f"{start_of_token[sequence, token]}, and the last one that begins up to it begins at "
                f"{last_start[sequence, token]}"
            )
        # (batch, seq): the starts in order, then seq
        starts = torch.where(is_start, places, seq).sort(dim=1).values
        most = int(is_start.sum(dim=1).max())
        return cls(start_of_token, starts[:, :most].contiguous())

    def tensor_split(self, parts: int) -> list[Documents]:
        """Split along the batch, as ``Tensor.tensor_split`` does."""
        split = (tensor.tensor_split(parts) for tensor in self)
        return [Documents(*pieces) for pieces in zip(*split, strict=True)]

    def ends(self) -> Tensor:
        """Where each document ends, if the sequences of the batch follow one another. It is computed on the device.

        Returns:
            (batch · documents + 1,) int32, beginning with 0. A document that a sequence does not have is empty.
        """
        batch, seq = self.start_of_token.shape
        first_tokens = torch.arange(batch, device=self.starts.device) * seq
        starts = self.starts + first_tokens[:, None]
        # A document ends where the next one begins, and the last one where the batch ends.
        ends = F.pad(starts.flatten(), (0, 1), value=batch * seq)
        return ends.to(torch.int32)

    def lengths(self) -> list[int]:
        """The number of tokens of each document, on the host, for documents on the CPU. They add up to batch · seq.

        A fake tensor has no values: every sequence is then one document, whose attention keeps as many bytes.
        """
        batch, seq = self.start_of_token.shape
        if is_fake(self.starts):
            return [seq] * batch
        lengths: list[int] = self.ends().diff().tolist()
        return lengths


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


def has_varlen(q: Tensor) -> bool:
    """Whether PyTorch has flash attention for documents of any length, in one call, for these heads on their device.

    It has on CUDA where it has flash attention, for a head_dim that 8 divides. ROCm's has not been tried.

    Args:
        q: (…, head_dim).
    """
    if torch.version.hip is not None or "window_size" not in VARLEN_ARGUMENTS:
        return False
    return q.shape[-1] % 8 == 0 and cuda_has_flash(q)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
) -> Tensor:
    """Every token attends to itself and to all tokens before it, in its document where there are several.

    Each document is computed by itself: on CUDA by PyTorch's `varlen_attn`, on the CPU by a call for each. Documents
    make a mask of (batch, 1, seq, seq) on CUDA without flash attention, on other devices, and in compiled code, whose
    graph must not depend on their number. On CUDA PyTorch's kernel for memory-efficient attention takes the mask.

    Args:
        q: (batch, heads, seq, head_dim).
        k, v: (batch, kv heads, seq, head_dim); each head serves heads / kv heads heads of q.
        documents: where documents begin in the sequences. None: each sequence is one text.
        window: how many tokens a token attends to at most, itself the last of them. Without documents it makes a mask,
            of (seq, seq).

    Returns:
        (batch, heads, seq, head_dim).
    """
    _, heads, seq, _ = q.shape
    n_rep = heads // k.shape[1]
    has_window = window is not None and window < seq
    if documents is not None and not torch.compiler.is_compiling():
        if q.device.type == "cpu":
            return attention_by_document(q, k, v, documents, window)
        if has_varlen(q):
            return varlen_attention(q, k, v, documents, window)
    masked = documents is not None or has_window
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
    if documents is not None:
        # (batch, queries, keys)
        in_document = keys >= documents.start_of_token[..., None]
        # (batch, 1, queries, keys): the same for all heads.
        visible = (visible & in_document)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)


def attention_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
) -> Tensor:
    """`causal_attention` with one call for each document, which needs no mask and computes no score between two.

    Args and result: as for `causal_attention`.
    """
    lengths = documents.lengths()
    outputs = []
    # Per document: (tokens, heads, head_dim). Backward of a split joins the gradients once, and not once for each part.
    q_parts = packed(q).split(lengths)
    k_parts = packed(k).split(lengths)
    v_parts = packed(v).split(lengths)
    for parts in zip(q_parts, k_parts, v_parts, strict=True):
        # (1, heads, tokens, head_dim)
        one_q, one_k, one_v = (tensor.transpose(0, 1)[None] for tensor in parts)
        if one_q.shape[2] > 0:
            out = causal_attention(one_q, one_k, one_v, window=window)
            outputs.append(packed(out))
    joined = torch.cat(outputs)
    return unpacked(joined, len(q))


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
) -> Tensor:
    """`causal_attention` by PyTorch's `varlen_attn`, one kernel for all documents, which needs no mask.

    Args and result: as for `causal_attention`.
    """
    n_rep = q.shape[1] // k.shape[1]
    attend: Callable[..., Any] = varlen_attn
    if n_rep > 1 and "enable_gqa" in VARLEN_ARGUMENTS:
        attend = partial(varlen_attn, enable_gqa=True)
    elif n_rep > 1:
        # (batch, heads, seq, head_dim)
        k = k.repeat_interleave(n_rep, dim=1)
        v = v.repeat_interleave(n_rep, dim=1)
    ends = documents.ends()
    # A bound for the longest document. The host knows its length only if it waits for the device.
    seq = q.shape[2]
    # Tokens that are visible before a token, and after it. -1: all of them, in its document.
    before = -1
    if window is not None and window < seq:
        before = window - 1
    out = attend(
        packed(q),
        packed(k),
        packed(v),
        ends,
        ends,
        seq,
        seq,
        window_size=(before, 0),
    )
    return unpacked(out, len(q))


def packed(x: Tensor) -> Tensor:
    """One sequence after the other: (batch, heads, seq, head_dim) to (batch · seq, heads, head_dim)."""
    return x.transpose(1, 2).flatten(0, 1)


def unpacked(x: Tensor, batch: int) -> Tensor:
    """The inverse of `packed`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


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
