"""Ring attention: keys and values go round the ranks of cp, and every rank attends to each part as it comes by.

::

    hop 0            hop 1            hop 2            hop 3             rank r has the queries of part r all the time,
    rank 0: kv 0     kv 3             kv 2             kv 1              and at hop h the keys and values of part r - h
    rank 1: kv 1     kv 0             kv 3             kv 2
    rank 2: kv 2     kv 1             kv 0             kv 3              while it attends to one part, the next is on
    rank 3: kv 3     kv 2             kv 1             kv 0              its way

A part is one chunk of the head of the sequence and one of its tail (see ``context.py``). Of a part that is not its own
a rank either sees the head chunk with all its queries, or both chunks with its tail queries: every hop is a dense
block, and half of a square, so that no rank waits for another::

                    keys of an earlier part     own part           keys of a later part
                      head    tail              head    tail         head    tail
    queries  head   [ all   │  ·   ]          [ ◣     │  ·   ]     [  ·    │  ·   ]
             tail   [ all   │  ·   ]          [ all   │  ◣   ]     [ all   │ all  ]

In backward the same goes round once more, and with each part travels the sum of its gradients, one hop behind, until it
is home. A rank sends cp - 1 parts forward; backward cp - 1 parts again, and cp times the gradients of one (in float32
at least). However many heads there are, cp can be any number.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; the two chunks: the Llama team, "The
Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.context.block_attention import block_backward, block_forward, merge


class RingAttention:
    """Causal attention over a sequence that is cut over `mesh` (one-dimensional): takes the place of a model's own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ring = Ring(mesh)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """
        Args:
            q: (batch, heads, seq / cp, head_dim). k, v: (batch, kv heads, seq / cp, head_dim); of this rank's tokens.

        Returns:
            (batch, heads, seq / cp, head_dim).
        """
        return _RoundTheRing.apply(q, k, v, self.ring)


class Ring:
    """The ranks in a circle: each sends to the next, and takes from the one before."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        members = dist.get_process_group_ranks(self.group)
        self.next = members[(self.rank + 1) % self.size]
        self.before = members[self.rank - 1]

    def pass_on(self, tensor: Tensor) -> Parcel:
        """Begin to send a tensor on, and to take one like it. All ranks do, in the same order."""
        return Parcel(self, tensor)


class Parcel:
    """A tensor on its way. What is sent must not be written to before `arrived`."""

    def __init__(self, ring: Ring, sent: Tensor) -> None:
        self.sent, self.taken = sent, torch.empty_like(sent)
        send = dist.P2POp(dist.isend, self.sent, ring.next, group=ring.group)
        take = dist.P2POp(dist.irecv, self.taken, ring.before, group=ring.group)
        self.works = dist.batch_isend_irecv([send, take])

    def arrived(self) -> Tensor:
        """Wait for both, and give what the rank before has sent."""
        for work in self.works:
            work.wait()
        return self.taken


def seen(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """What queries of part `rank` see of the keys of part `source`, each `length` tokens.

    Returns:
        Which queries, which keys, and whether as a triangle: the first sees one key, the next two, …
    """
    everything, half = slice(0, length), length // 2
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


class _RoundTheRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:  # type: ignore[override]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)  # (batch, heads, seq / cp, head_dim)
        lse = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)  # (batch, heads, seq / cp)
        kv = torch.stack((k, v))  # (2, batch, kv heads, seq / cp, head_dim)
        for hop in range(ring.size):
            next_kv = ring.pass_on(kv) if hop < ring.size - 1 else None
            rows, keys, triangle = seen(ring.rank, (ring.rank - hop) % ring.size, q.shape[2])
            here_k, here_v = _for_each_head(kv[:, :, :, keys], q.shape[1])
            part_out, part_lse = block_forward(q[:, :, rows], here_k, here_v, triangle)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], part_out, part_lse)
            if next_kv is not None:
                kv = next_kv.arrived()
        ctx.ring = ring
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        dq = torch.zeros_like(q, dtype=lse.dtype)
        kv = torch.stack((k, v))  # (2, batch, kv heads, seq / cp, head_dim)
        dkv = torch.zeros_like(kv, dtype=lse.dtype)
        on_its_way: Parcel | None = None
        for hop in range(ring.size):
            next_kv = ring.pass_on(kv) if hop < ring.size - 1 else None
            rows, keys, triangle = seen(ring.rank, (ring.rank - hop) % ring.size, q.shape[2])
            here_k, here_v = _for_each_head(kv[:, :, :, keys], q.shape[1])
            here_gradient, here_q, here_out, here_lse = (t[:, :, rows] for t in (gradient, q, out, lse))
            here_dq, *here_dkv = block_backward(
                here_gradient, here_q, here_k, here_v, here_out, here_lse.contiguous(), triangle
            )
            dq[:, :, rows] += here_dq
            if next_kv is not None:
                kv = next_kv.arrived()
            if on_its_way is not None:
                dkv = on_its_way.arrived()  # of the part that was here at this hop, from the ranks it has visited
            dkv[:, :, :, keys] += _from_each_head(torch.stack(here_dkv).to(dkv.dtype), kv.shape[2])
            on_its_way = ring.pass_on(dkv)
        assert on_its_way is not None
        dk, dv = on_its_way.arrived()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def _for_each_head(kv: Tensor, heads: int) -> Tensor:
    """(2, batch, kv heads, keys, head_dim) to (2, batch, heads, keys, head_dim)."""
    return kv.repeat_interleave(heads // kv.shape[2], dim=2)


def _from_each_head(dkv: Tensor, kv_heads: int) -> Tensor:
    """Backward of that: (2, batch, heads, keys, head_dim) added up to (2, batch, kv heads, keys, head_dim)."""
    return dkv.unflatten(2, (kv_heads, -1)).sum(3)
