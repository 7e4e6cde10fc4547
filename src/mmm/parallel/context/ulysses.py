"""Ulysses: for attention alone, the cut goes from the sequence to the heads, and back.

::

                 heads                                        heads
             0   1   2   3                                0 │ 1 │ 2 │ 3
    part 0   rank 0 . . . .      all-to-all               r │ r │ r │ r
    ─────────────────────────    ──────────────▶          a │ a │ a │ a      each rank: the whole sequence
    part 1   rank 1 . . . .      q, k, v together         n │ n │ n │ n      of some heads, and plain attention
    ─────────────────────────                             k │ k │ k │ k
    part 2   rank 2 . . . .      ◀──────────────            │   │   │
    ─────────────────────────    the output, all-to-all   0 │ 1 │ 2 │ 3
    part 3   rank 3 . . . .

A rank sends (cp - 1) / cp of its own q, k, v and output, where a ring sends its own k and v cp - 1 times: less when cp
is large. But there can be no more ranks than heads. Key/value heads that cp does not divide are repeated, just as often
as it takes.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class UlyssesAttention:
    """Causal attention over a sequence that is cut over `mesh` (one-dimensional): takes the place of a model's own.

    Args:
        attention_fn: that one: attention to whole sequences of some heads.
    """

    def __init__(self, mesh: DeviceMesh, attention_fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.group, self.size, self.attention_fn = mesh.get_group(), mesh.size(), attention_fn

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """
        Args:
            q: (batch, heads, seq / cp, head_dim), heads a multiple of cp. k, v: (batch, kv heads, seq / cp, head_dim);
                of this rank's tokens.

        Returns:
            (batch, heads, seq / cp, head_dim).
        """
        repeats = math.lcm(k.shape[1], self.size) // k.shape[1]
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        pieces = [t.unflatten(1, (self.size, -1)).movedim(1, 0) for t in (q, k, v)]  # (cp, batch, heads / cp, …)
        taken = AllToAll.apply(torch.cat(pieces, dim=2), self.group)  # by the part that they come from
        q, k, v = (in_order(t) for t in taken.split([piece.shape[2] for piece in pieces], dim=2))
        out = self.attention_fn(q, k, v)  # (batch, heads / cp, seq, head_dim)
        back = AllToAll.apply(in_parts(out, self.size), self.group)  # (cp, batch, heads / cp, seq / cp, head_dim)
        return back.movedim(0, 1).flatten(1, 2)


class AllToAll(torch.autograd.Function):
    """Piece i of rank j becomes piece j of rank i; so do the gradients, backwards."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        pieces = pieces.contiguous()
        taken = torch.empty_like(pieces)
        dist.all_to_all_single(taken, pieces, group=group)
        return taken

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return AllToAll.apply(gradient, ctx.group), None


def in_order(parts: Tensor) -> Tensor:
    """The whole sequence of its parts: part r is chunks r and 2 · cp - 1 - r.

    Args:
        parts: (cp, batch, heads, seq / cp, head_dim).

    Returns:
        (batch, heads, seq, head_dim).
    """
    head, tail = parts.unflatten(3, (2, -1)).unbind(3)  # each (cp, batch, heads, chunk, head_dim)
    return torch.cat((head, tail.flip(0))).movedim(0, 2).flatten(2, 3)


def in_parts(whole: Tensor, cp: int) -> Tensor:
    """The other way: (batch, heads, seq, head_dim) to (cp, batch, heads, seq / cp, head_dim)."""
    head, tail = whole.unflatten(2, (2 * cp, -1)).movedim(2, 0).chunk(2)  # each (cp, batch, heads, chunk, head_dim)
    return torch.cat((head, tail.flip(0)), dim=3)
