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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *documents: Tensor) -> Tensor:
        """
        Args:
            q: (batch, heads, seq / cp, head_dim) of this rank's tokens; heads is a multiple of cp.
            k, v: (batch, kv heads, seq / cp, head_dim) of this rank's tokens.
            documents: further arguments of `attention_fn`, for the full sequence.

        Returns:
            (batch, heads, seq / cp, head_dim).
        """
        repeats = math.lcm(k.shape[1], self.size) // k.shape[1]
        if repeats > 1:
            k = k.repeat_interleave(repeats, dim=1)
            v = v.repeat_interleave(repeats, dim=1)
        # (batch, heads, seq / cp, head_dim) → (cp, batch, heads / cp, seq / cp, head_dim): what goes to each rank.
        pieces = [t.unflatten(1, (self.size, -1)).movedim(1, 0) for t in (q, k, v)]
        heads = [piece.shape[2] for piece in pieces]
        # One all-to-all of the cp ranks for q, k and v: heads go to their ranks, and arrive in the order of the source
        # shards. In backward the gradients go the other way.
        received = wait_tensor(all_to_all_single_autograd(torch.cat(pieces, dim=2), None, None, self.group))
        # Each (batch, heads / cp, seq, head_dim).
        q, k, v = (join_shards(shards) for shards in received.split(heads, dim=2))
        out = self.attention_fn(q, k, v, *documents)
        # (cp, batch, heads / cp, seq / cp, head_dim): what goes back to the rank of each shard.
        shards = split_shards(out, self.size)
        returned = wait_tensor(all_to_all_single_autograd(shards, None, None, self.group))
        # (batch, heads, seq / cp, head_dim)
        return returned.movedim(0, 1).flatten(1, 2)


def join_shards(shards: Tensor) -> Tensor:
    """Put the full sequence together from its shards: shard r is chunks r and 2 · cp - 1 - r.

    Args:
        shards: (cp, batch, heads, seq / cp, head_dim).

    Returns:
        (batch, heads, seq, head_dim).
    """
    # Each (cp, batch, heads, chunk, head_dim), in the order of the ranks; the tail chunks lie in the opposite order.
    head, tail = shards.unflatten(3, (2, -1)).unbind(3)
    # (2 · cp, batch, heads, chunk, head_dim) → (batch, heads, 2 · cp, chunk, head_dim) → (batch, heads, seq, head_dim)
    return torch.cat((head, tail.flip(0))).movedim(0, 2).flatten(2, 3)


def split_shards(full: Tensor, cp: int) -> Tensor:
    """The inverse of `join_shards`: (batch, heads, seq, head_dim) to (cp, batch, heads, seq / cp, head_dim)."""
    # Each (cp, batch, heads, chunk, head_dim).
    head, tail = full.unflatten(2, (2 * cp, -1)).movedim(2, 0).chunk(2)
    return torch.cat((head, tail.flip(0)), dim=3)
