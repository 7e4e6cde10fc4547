"""Ring attention: keys and values go round the ranks of cp, and every rank attends to each shard as it arrives.

::

    hop 0            hop 1            hop 2            hop 3             rank r has the queries of shard r all the time,
    rank 0: kv 0     kv 3             kv 2             kv 1              and at hop h the keys and values of shard r - h
    rank 1: kv 1     kv 0             kv 3             kv 2
    rank 2: kv 2     kv 1             kv 0             kv 3              while it attends to one shard, the next is on
    rank 3: kv 3     kv 2             kv 1             kv 0              its way

A shard is one chunk of the head of the sequence and one of its tail (`mmm.parallel.cp.context_parallel`). Of the keys
of another shard, either all of a rank's queries attend to the head chunk, or its tail queries to both chunks: every hop
is a dense block, half of a square, so that no rank waits for another::

                    keys of an earlier shard    own shard          keys of a later shard
                      head    tail              head    tail         head    tail
    queries  head   [ all   │  ·   ]          [ ◣     │  ·   ]     [  ·    │  ·   ]
             tail   [ all   │  ·   ]          [ all   │  ◣   ]     [ all   │ all  ]

In backward keys and values go round once more, and the sum of their gradients follows one hop behind, until it is back
at its own rank. A rank sends cp - 1 shards in forward; in backward cp - 1 shards again, and cp times the gradients of
one (in float32 at least). cp can be any number, however many heads there are.

Where a sequence has several documents, every rank knows where all of them begin, and nothing more is sent: of the keys
above, a query sees those from its document's first one on.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; the two chunks: the Llama team, "The
Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.cp.block_attention import block_backward, block_forward, merge
from mmm.parallel.double_backward import refuse_create_graph


class RingAttention:
    """Causal attention over a sequence that is sharded over `mesh` (one-dimensional): replaces a model's own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ring = Ring(mesh)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """
        Args:
            q: (batch, heads, seq / cp, head_dim). k, v: (batch, kv heads, seq / cp, head_dim); of this rank's tokens.
            document_starts: (batch, seq) int64, as of `mmm.nn.attention.causal_attention`, of the full sequence.

        Returns:
            (batch, heads, seq / cp, head_dim).
        """
        return _RingAttention.apply(q, k, v, self.ring, document_starts)


class Ring:
    """The ranks in a circle: each sends to the next, and receives from the previous one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        members = dist.get_process_group_ranks(self.group)
        self.next = members[(self.rank + 1) % self.size]
        self.previous = members[self.rank - 1]

    def send_recv(self, tensor: Tensor) -> P2PExchange:
        """Begin to send a tensor to the next rank, and to receive one like it. All ranks do, in the same order."""
        return P2PExchange(self, tensor)


class P2PExchange:
    """A send and a receive in flight. What is sent must not be written to before `wait`."""

    def __init__(self, ring: Ring, tensor: Tensor) -> None:
        self.sent, self.received = tensor, torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, self.sent, ring.next, group=ring.group)
        receive = dist.P2POp(dist.irecv, self.received, ring.previous, group=ring.group)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Wait for both, and return what was received."""
        for work in self.works:
            work.wait()
        return self.received


def positions_of(coordinate: int, cp: int, seq_length: int) -> Tensor:
    """The positions of the tokens of cp coordinate r: chunks r and 2 · cp - 1 - r of 2 · cp, in ascending order.

    Args:
        coordinate: 0 … cp - 1. seq_length: in tokens, a multiple of 2 · cp, or of anything if cp is 1.

    Returns:
        (seq_length / cp,) int64.
    """
    everything = torch.arange(seq_length)
    if cp == 1:
        return everything
    if seq_length % (2 * cp):
        raise ValueError(f"{seq_length} tokens do not divide into 2 · cp = {2 * cp} chunks of the same length")
    chunks = everything.chunk(2 * cp)
    return torch.cat((chunks[coordinate], chunks[2 * cp - 1 - coordinate]))


def visible(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """Which keys of shard `source` the queries of shard `rank` attend to; each shard has `length` tokens.

    Returns:
        Which queries, which keys, and whether causally: the first query to one key, the next to two, …
    """
    everything, half = slice(0, length), length // 2
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


def _first_keys(ring: Ring, hop: int, document_starts: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """The first key of a hop's block that each query of `rows` sees, (batch, queries), where there are documents."""
    if document_starts is None:
        return None
    seq = document_starts.shape[1]
    own = positions_of(ring.rank, ring.size, seq)
    others = positions_of((ring.rank - hop) % ring.size, ring.size, seq)
    starts = document_starts[:, own[rows].to(document_starts.device)]  # (batch, queries)
    return torch.searchsorted(others[keys].to(starts.device), starts)


class Block(NamedTuple):
    """What a rank computes at one hop: some of its queries attend to some of the keys that have come.

    Attributes:
        rows, keys: of the rank's queries, and of the shard's keys.
        k, v: (batch, kv heads, keys, head_dim). causal, first_key: as of `block_forward`.
    """

    rows: slice
    keys: slice
    k: Tensor
    v: Tensor
    causal: bool
    first_key: Tensor | None


def _hops(ring: Ring, k: Tensor, v: Tensor, document_starts: Tensor | None) -> Iterator[Block]:
    """The block of each hop; while one is computed, the next shard is on its way. A collective."""
    kv = torch.stack((k, v))  # (2, batch, kv heads, seq / cp, head_dim)
    for hop in range(ring.size):
        next_kv = ring.send_recv(kv) if hop < ring.size - 1 else None
        rows, keys, causal = visible(ring.rank, (ring.rank - hop) % ring.size, k.shape[2])
        block_k, block_v = kv[:, :, :, keys]
        yield Block(rows, keys, block_k, block_v, causal, _first_keys(ring, hop, document_starts, rows, keys))
        if next_kv is not None:
            kv = next_kv.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, document_starts: Tensor | None
    ) -> Tensor:
        accum_dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=accum_dtype)  # (batch, heads, seq / cp, head_dim)
        lse = torch.full(q.shape[:-1], -math.inf, dtype=accum_dtype, device=q.device)  # (batch, heads, seq / cp)
        for rows, _, block_k, block_v, causal, first_key in _hops(ring, k, v, document_starts):
            block_out, block_lse = block_forward(q[:, :, rows], block_k, block_v, causal, first_key)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
        ctx.ring = ring
        ctx.document_starts = document_starts
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_create_graph("ring attention", "it has no second derivative; use cp_style ulysses, or cp 1")
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)  # of the shard that is here
        next_dkv: P2PExchange | None = None
        for rows, keys, block_k, block_v, causal, first_key in _hops(ring, k, v, ctx.document_starts):
            block_gradient, block_q, block_out, block_lse = (t[:, :, rows] for t in (gradient, q, out, lse))
            block_dq, *block_dkv = block_backward(
                block_gradient, block_q, block_k, block_v, block_out, block_lse.contiguous(), causal, first_key
            )
            dq[:, :, rows] += block_dq
            if next_dkv is not None:
                dkv = next_dkv.wait()  # of this hop's shard, summed over the ranks that it has visited
            dkv[:, :, :, keys] += torch.stack(block_dkv).to(dkv.dtype)
            next_dkv = ring.send_recv(dkv)
        assert next_dkv is not None
        dk, dv = next_dkv.wait()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None
