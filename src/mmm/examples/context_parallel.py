"""Context parallel: every sequence sharded over the ranks, for texts that are too long for one of them.

    launch python3 -m mmm.examples.context_parallel
    launch -n 4 --device cpu python3 -m mmm.examples.context_parallel --cp_style ulysses
    launch -n 2 --device cpu python3 -m mmm.examples.context_parallel --break positions

Along cp the ranks have the same samples, but different tokens of them: two chunks each, one from the head and one from
the tail, because later tokens have more to look back at; cp = 4, 512 tokens::

    a sequence     ┌────┬────┬────┬────┬────┬────┬────┬────┐
                   │ 0  │ 1  │ 2  │ 3  │ 3  │ 2  │ 1  │ 0  │    which rank has the chunk of 64 tokens
                   └────┴────┴────┴────┴────┴────┴────┴────┘
    all but attention      each rank its own 128 tokens, nothing to send
    attention, ring        hop 1, 2, 3: send the keys and values held to the next rank, take those of the rank before
                           rank 1 has keys of    hop 0: rank 1    hop 1: rank 0    hop 2: rank 3    hop 3: rank 2
    attention, ulysses     all-to-all: each rank gets the full sequence of heads / cp heads; and back

`ring_attention` writes the ring out for one layer, and is compared with attention to the full sequence. The model then
trains with the package's ring, which sends while it computes. Parameters are sharded over dp × cp together (FSDP).
The losses are those of one device, whatever the style and the mesh.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SendToNext(torch.autograd.Function):
    """To the next rank of the ring, in exchange for what the rank before sends; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, step: int = 1) -> Tensor:
        ctx.group, ctx.step = group, step
        ranks, received = dist.get_process_group_ranks(group), torch.empty_like(x)
        at = dist.get_rank(group)
        send = dist.P2POp(dist.isend, x.contiguous(), ranks[(at + step) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, received, ranks[(at - step) % len(ranks)], group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return SendToNext.apply(gradient, ctx.group, -ctx.step), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over some of the keys, and the logarithm of its sum of exponentials: (…, queries, head_dim), (…, 1)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (batch, heads, queries, keys)
    scores = scores.masked_fill(~visible, -1e30)  # not -inf: a query that sees none of these keys merges with weight 0
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def positions_of(rank: int, ranks: int, seq: int) -> Tensor:
    """The tokens that a rank has: one chunk from the head and one from the tail, (seq / ranks,)."""
    chunks = torch.arange(seq).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, triangle: bool = True) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks: (batch, heads, seq / ranks, head_dim) each."""
    rank, ranks, wide = dist.get_rank(group), dist.get_world_size(group), torch.promote_types(q.dtype, torch.float32)
    kv = torch.stack((k, v)).to(wide)  # (2, batch, kv heads, seq / ranks, head_dim)
    mine = positions_of(rank, ranks, ranks * q.shape[2])
    for hop in range(ranks):
        if hop:
            kv = SendToNext.apply(kv, group)
        theirs = positions_of((rank - hop) % ranks, ranks, ranks * q.shape[2])
        visible = mine[:, None] >= theirs if triangle else torch.ones(len(mine), len(mine), dtype=torch.bool)
        heads = kv.repeat_interleave(q.shape[1] // k.shape[1], dim=2)  # each serves several heads of q
        part, part_lse = attention(q.to(wide), *heads, visible.to(q.device))
        if not hop:
            out, lse = part, part_lse
            continue
        total = torch.logaddexp(lse, part_lse)  # the softmax over both: each weighed by its sum of exponentials
        out, lse = out * torch.exp(lse - total) + part * torch.exp(part_lse - total), total
    return out.to(q.dtype)
