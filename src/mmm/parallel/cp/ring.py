"""Ring attention: keys and values go around the ranks of cp, and every rank attends to each shard as it arrives.

::

    hop 0            hop 1            hop 2            hop 3             rank r has the queries of shard r all the time,
    rank 0: kv 0     kv 3             kv 2             kv 1              and at hop h the keys and values of shard r - h
    rank 1: kv 1     kv 0             kv 3             kv 2
    rank 2: kv 2     kv 1             kv 0             kv 3              while it attends to one shard, the next is on
    rank 3: kv 3     kv 2             kv 1             kv 0              its way

A shard is one chunk of the head of the sequence and one of its tail (`mmm.parallel.cp.context_parallel`). Of the keys
of another shard, either all of a rank's queries attend to the head chunk, or its tail queries attend to both chunks:
every hop is a dense block, half of a square, so that no rank waits for another::

                    keys of an earlier shard    own shard          keys of a later shard
                      head    tail              head    tail         head    tail
    queries  head   [ all   │  ·   ]          [ ◣     │  ·   ]     [  ·    │  ·   ]
             tail   [ all   │  ·   ]          [ all   │  ◣   ]     [ all   │ all  ]

In backward keys and values go around once more. The sum of their gradients follows one hop behind, until it is back at
its own rank. A rank sends cp - 1 shards in forward; in backward cp - 1 shards again, and cp times the gradients of one
(in float32 at least). cp can be any number, however many heads there are.

Where a sequence has several documents, every rank knows where all of them begin, and nothing more is sent: of the keys
above, a query sees those from the beginning of its document.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; the two chunks: the Llama team, "The
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

from mmm.nn.attention import Documents
from mmm.parallel.cp.block_attention import block_backward, block_forward, merge
from mmm.parallel.double_backward import refuse_create_graph


class RingAttention:
    """Causal attention over a sequence that is sharded over `mesh` (one-dimensional). Replaces a model's attention."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ring = Ring(mesh)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """
        Args:
            q: (batch, heads, seq / cp, head_dim) of this rank's tokens.
            k, v: (batch, kv heads, seq / cp, head_dim) of this rank's tokens.
            documents: of the full sequences, as for `mmm.nn.attention.causal_attention`.

        Returns:
            (batch, heads, seq / cp, head_dim).
        """
        document_starts = None
        if documents is not None:
            document_starts = documents.start_of_token
        return _RingAttention.apply(q, k, v, self.ring, document_starts)


class Ring:
    """The ranks in a circle: each sends to the next, and receives from the previous one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        # Messages are addressed by global ranks.
        members = dist.get_process_group_ranks(self.group)
        next_place = (self.rank + 1) % self.size
        self.next = members[next_place]
        self.previous = members[self.rank - 1]


class P2PExchange:
    """Sends a tensor to the next rank, and receives one of its shape from the previous rank.

    All ranks of the ring do so, in the same order. The tensor that is sent must not be written to before `wait`.
    """

    def __init__(self, ring: Ring, tensor: Tensor) -> None:
        # Kept here: its memory must live until it has been sent.
        self.sent = tensor
        self.received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, ring.next, group=ring.group)
        receive = dist.P2POp(dist.irecv, self.received, ring.previous, group=ring.group)
        # As one batch: the ranks of a ring all send first, and would otherwise wait for each other.
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Wait for both, and return what was received."""
        for work in self.works:
            work.wait()
        return self.received


def positions_of(coordinate: int, cp: int, seq_length: int) -> Tensor:
    """The positions of the tokens at cp coordinate r: chunks r and 2 · cp - 1 - r of 2 · cp, in ascending order.

    Args:
        coordinate: 0 … cp - 1.
        seq_length: length of the full sequence in tokens, a multiple of 2 · cp; any length if cp is 1.

    Returns:
        (seq_length / cp,) int64.
    """
    positions = torch.arange(seq_length)
    if cp == 1:
        return positions
    n_chunks = 2 * cp
    if seq_length % n_chunks:
        raise ValueError(f"{seq_length} tokens do not divide into 2 · cp = {n_chunks} chunks of the same length")
    chunks = positions.chunk(n_chunks)
    head = chunks[coordinate]
    tail = chunks[n_chunks - 1 - coordinate]
    return torch.cat((head, tail))


def visible(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """Which keys of shard `source` the queries of shard `rank` attend to.

    Args:
        length: number of tokens in each shard.

    Returns:
        Which queries, which keys, and whether causally: the first query to one key, the next to two, …
    """
    everything = slice(0, length)
    half = length // 2
    if source == rank:
        return everything, everything, True
    if source < rank:
        # The source's head chunk is before both of this rank's chunks, its tail chunk after both.
        return everything, slice(0, half), False
    # Both of the source's chunks lie between this rank's head chunk and its tail chunk.
    return slice(half, length), everything, False


def _first_keys(
    ring: Ring,
    hop: int,
    document_starts: Tensor | None,
    rows: slice,
    keys: slice,
) -> Tensor | None:
    """The first key of a hop's block that each query of `rows` sees, (batch, queries); None without documents."""
    if document_starts is None:
        return None
    seq_length = document_starts.shape[1]
    device = document_starts.device
    source = (ring.rank - hop) % ring.size
    query_positions = positions_of(ring.rank, ring.size, seq_length)[rows].to(device)
    key_positions = positions_of(source, ring.size, seq_length)[keys].to(device)
    # (batch, queries): where the document of each query begins, in the full sequence.
    starts = document_starts[:, query_positions]
    # Positions ascend in a shard: the first key is the first one that is not before the document.
    return torch.searchsorted(key_positions, starts)


class Block(NamedTuple):
    """What a rank computes at one hop: some of its queries attend to some of the keys that have arrived.

    Attributes:
        rows: which of the rank's queries.
        keys: which of the shard's keys.
        k, v: (batch, kv heads, keys, head_dim).
        causal, first_key: as for `block_forward`.
    """

    rows: slice
    keys: slice
    k: Tensor
    v: Tensor
    causal: bool
    first_key: Tensor | None


def _hops(
    ring: Ring,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
) -> Iterator[Block]:
    """The block of each hop. While one is computed, the next shard is on its way. A collective of the ring."""
    # (2, batch, kv heads, seq / cp, head_dim): one message for keys and values.
    kv = torch.stack((k, v))
    length = k.shape[2]
    last_hop = ring.size - 1
    for hop in range(ring.size):
        next_kv = None
        if hop < last_hop:
            next_kv = P2PExchange(ring, kv)
        source = (ring.rank - hop) % ring.size
        rows, keys, causal = visible(ring.rank, source, length)
        first_key = _first_keys(ring, hop, document_starts, rows, keys)
        # Each (batch, kv heads, keys, head_dim).
        block_k, block_v = kv[:, :, :, keys]
        yield Block(rows, keys, block_k, block_v, causal, first_key)
        if next_kv is not None:
            kv = next_kv.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ring: Ring,
        document_starts: Tensor | None,
    ) -> Tensor:
        accum_dtype = torch.promote_types(q.dtype, torch.float32)
        # (batch, heads, seq / cp, head_dim)
        out = torch.zeros_like(q, dtype=accum_dtype)
        # (batch, heads, seq / cp): -inf, because no query has seen a key yet.
        lse = torch.full(q.shape[:-1], -math.inf, dtype=accum_dtype, device=q.device)
        for rows, _, block_k, block_v, causal, first_key in _hops(ring, k, v, document_starts):
            block_q = q[:, :, rows]
            block_out, block_lse = block_forward(block_q, block_k, block_v, causal, first_key)
            # Views, into which the merged attention is written.
            row_out = out[:, :, rows]
            row_lse = lse[:, :, rows]
            merged_out, merged_lse = merge(row_out, row_lse, block_out, block_lse)
            row_out.copy_(merged_out)
            row_lse.copy_(merged_lse)
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
        # (2, batch, kv heads, seq / cp, head_dim): gradients of the keys and values that this rank has at this hop.
        dkv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        next_dkv: P2PExchange | None = None
        for rows, keys, block_k, block_v, causal, first_key in _hops(ring, k, v, ctx.document_starts):
            block_dq, *block_dkv = block_backward(
                gradient[:, :, rows],
                q[:, :, rows],
                block_k,
                block_v,
                out[:, :, rows],
                lse[:, :, rows].contiguous(),
                causal,
                first_key,
            )
            dq[:, :, rows] += block_dq
            if next_dkv is not None:
                # The gradients of this hop's shard, summed over the ranks that it has visited so far.
                dkv = next_dkv.wait()
            dkv[:, :, :, keys] += torch.stack(block_dkv).to(dkv.dtype)
            next_dkv = P2PExchange(ring, dkv)
        assert next_dkv is not None
        # After cp hops, the gradients of this rank's own shard are back, summed over all ranks of cp.
        dk, dv = next_dkv.wait()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None
