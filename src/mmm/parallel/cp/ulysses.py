"""Ulysses: during attention, heads are sharded instead of the sequence.

::

                 heads                                        heads
             0   1   2   3                                0 │ 1 │ 2 │ 3
    shard 0  rank 0 . . . .      all-to-all               r │ r │ r │ r
    ─────────────────────────    ──────────────▶          a │ a │ a │ a      each rank: the full sequence
    shard 1  rank 1 . . . .      q, k, v together         n │ n │ n │ n      of some heads, and plain attention
    ─────────────────────────                             k │ k │ k │ k
    shard 2  rank 2 . . . .      ◀──────────────            │   │   │
    ─────────────────────────    the output, all-to-all   0 │ 1 │ 2 │ 3
    shard 3  rank 3 . . . .

A rank sends (cp - 1) / cp of its own q, k, v and output, where a ring sends its own k and v cp - 1 times: less, if cp
is large. But there can be no more ranks than heads. Key/value heads that cp does not divide are repeated as often as
needed.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm.nn.attention import Documents
from mmm.torch_private.groups import all_to_all_single_autograd, wait_tensor


class UlyssesAttention:
    """Causal attention over a sequence that is sharded over `mesh` (one-dimensional). Replaces a model's attention.

    Args:
        mesh: the ranks that share heads.
        attention_fn: the model's own attention, for full sequences of some heads.
    """

    def __init__(self, mesh: DeviceMesh, attention_fn: Callable[..., Tensor]) -> None:
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.attention_fn = attention_fn

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *documents: Documents,
    ) -> Tensor:
        """
        Args:
            q: (batch, heads, seq / cp, head_dim) of this rank's tokens; heads is a multiple of cp.
            k, v: (batch, kv heads, seq / cp, head_dim) of this rank's tokens.
            documents: further arguments of `attention_fn`, for the full sequence.

        Returns:
            (batch, heads, seq / cp, head_dim).
        """
        kv_heads = k.shape[1]
        repeats = math.lcm(kv_heads, self.size) // kv_heads
        if repeats > 1:
            k = k.repeat_interleave(repeats, dim=1)
            v = v.repeat_interleave(repeats, dim=1)
        # (batch, heads, seq / cp, head_dim) → (cp, batch, heads / cp, seq / cp, head_dim): what goes to each rank.
        pieces = []
        for heads in (q, k, v):
            by_rank = heads.unflatten(1, (self.size, -1))
            pieces.append(by_rank.movedim(1, 0))
        # One all-to-all of the cp ranks for q, k and v: heads go to their ranks, and arrive in the order of the source
        # shards. In backward the gradients go the other way.
        received = self._all_to_all(torch.cat(pieces, dim=2))
        q_shards, k_shards, v_shards = received.split([piece.shape[2] for piece in pieces], dim=2)
        # Each (batch, heads / cp, seq, head_dim).
        full_q = join_shards(q_shards)
        full_k = join_shards(k_shards)
        full_v = join_shards(v_shards)
        out = self.attention_fn(full_q, full_k, full_v, *documents)
        # (cp, batch, heads / cp, seq / cp, head_dim): what goes back to the rank of each shard.
        returned = self._all_to_all(split_shards(out, self.size))
        # (batch, heads, seq / cp, head_dim)
        return returned.movedim(0, 1).flatten(1, 2)

    def _all_to_all(self, pieces: Tensor) -> Tensor:
        """Send piece r, along dim 0, to rank r of cp, and receive one from each rank. A collective of the cp ranks."""
        received = all_to_all_single_autograd(pieces, None, None, self.group)
        return wait_tensor(received)


def join_shards(shards: Tensor) -> Tensor:
    """Put the full sequence together from its shards: shard r is chunks r and 2 · cp - 1 - r.

    Args:
        shards: (cp, batch, heads, seq / cp, head_dim).

    Returns:
        (batch, heads, seq, head_dim).
    """
    # Each (cp, batch, heads, chunk, head_dim), in the order of the ranks; the tail chunks lie in the opposite order.
    chunks = shards.unflatten(3, (2, -1))
    head, tail = chunks.unbind(3)
    # (2 · cp, batch, heads, chunk, head_dim)
    in_order = torch.cat((head, tail.flip(0)))
    # (batch, heads, 2 · cp, chunk, head_dim) → (batch, heads, seq, head_dim)
    return in_order.movedim(0, 2).flatten(2, 3)


def split_shards(full: Tensor, cp: int) -> Tensor:
    """The inverse of `join_shards`: (batch, heads, seq, head_dim) to (cp, batch, heads, seq / cp, head_dim)."""
    n_chunks = 2 * cp
    # (2 · cp, batch, heads, chunk, head_dim)
    chunks = full.unflatten(2, (n_chunks, -1)).movedim(2, 0)
    # Each (cp, batch, heads, chunk, head_dim).
    head, tail = chunks.chunk(2)
    return torch.cat((head, tail.flip(0)), dim=3)
