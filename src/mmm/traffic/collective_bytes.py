"""What one call to a process group costs a rank: bytes it sends, by the best algorithm.

With W the bytes of the full buffer and n ranks, a rank sends::

    all-reduce        2 (n-1)/n W   ring: reduce-scatter, then all-gather
    all-gather          (n-1)/n W   ring
    reduce-scatter      (n-1)/n W   ring
    all-to-all          all but its own 1/n, directly
    scatter, gather     what is for, or goes to, the root
    broadcast         W             a chain; the last sends nothing
    reduce            W             a chain; the root sends nothing
    send              W
    receive, barrier  0

W is an all-gather's output, a reduce-scatter's input. With no algorithm does the busiest rank send less; latency is not
counted.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005; Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (the ring; nothing beats it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmm.layout import UNSHARDED, Layout


@dataclass(frozen=True)
class Call:
    """One call to a process group, as one of its ranks sees it.

    Attributes:
        operation: a row of the table above, such as ``all_reduce``.
        size: ranks of the group. rank: this one's number in it. root: that of the root, where there is one; of a
            send, the receiver's.
        payload: W, in bytes.
        leaving: bytes sent to others directly, for all_to_all, scatter, gather and send.
    """

    operation: str
    size: int
    rank: int
    payload: int
    root: int = 0
    leaving: int = 0

    def sent(self) -> float:
        """Bytes that this rank sends by the stated algorithm."""
        n, operation = self.size, self.operation
        if n == 1:
            return 0.0
        if operation in DIRECT:
            return float(self.leaving)
        if operation in ("broadcast", "reduce"):
            quiet = (self.root - 1) % n if operation == "broadcast" else self.root
            return 0.0 if self.rank == quiet else float(self.payload)
        return factor(operation, n) * self.payload


DIRECT = ("all_to_all", "scatter", "gather", "send", "receive", "barrier")


def factor(operation: str, ranks: int) -> float:
    """Bytes that the busiest rank sends by the stated algorithm, of each byte of the full buffer."""
    if ranks == 1:
        return 0.0
    part = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * part,
        "all_gather": part,
        "reduce_scatter": part,
        "all_to_all": part,
        "scatter": part,
        "gather": 1 / ranks,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
        "receive": 0.0,
        "barrier": 0.0,
    }[operation]


def sharded_bytes(
    technique: str, layout: Layout, local: int, padded: int, gathered: float, shard: float
) -> dict[str, float]:
    """Bytes of gathering parameters and summing gradients over the data-parallel axes, without those of one rank.

    Args:
        local: bytes of a rank's parameters before data parallelism. padded: until their rows divide over the ranks.
        gathered: under FSDP, bytes of all that a step gathers.
        shard: under FSDP, bytes of a rank's shard of the parameters. Experts are sharded over more ranks than the rest.
    """
    axis = "dp_shard"
    if layout.cp > 1:
        axis = "dp_shard_cp" if layout.dp_shard > 1 else "cp"
    shards = layout.dp_shard * layout.cp
    if technique not in UNSHARDED:
        return {
            axis: factor("all_gather", shards) * gathered + factor("reduce_scatter", shards) * padded,
            "dp_replicate": factor("all_reduce", layout.dp_replicate) * shard,
        }
    if layout.dp_replicate > 1:
        axis, shards = "dp_replicate", layout.dp_replicate
    if technique == "ddp":
        return {axis: factor("all_reduce", shards) * local}
    summed = factor("reduce_scatter", shards) * padded if technique == "zero2" else factor("all_reduce", shards) * local
    return {axis: summed + factor("all_gather", shards) * padded}


def language_bytes(
    tp: int,
    tokens: float,
    dim: int,
    layers: int,
    ends: tuple[bool, bool],
    residual: int,
    compute: int,
    pairs: int = 2,
    biases: bool = False,
) -> float:
    """Bytes that tensor parallelism sends for a language model whose sequence is sharded between the products.

    Args:
        ends: whether the embedding and the output are here. residual, compute: bytes of an element of the residual
            stream, and of a product. pairs: of matrix products in a layer. biases: whether norms have them.
    """
    first, last = ends
    # An all-gather before columns, a reduce-scatter after rows, and in backward each the other way round.
    passes = 2 * (pairs * layers * (residual + compute) + (first + last) * residual)
    norms = (2 * layers + last) * (1 + biases)  # each rank has the gradient of its local tokens
    loss = 3 * tokens * max(compute, 4) * last  # the largest logit, the sum of exponentials, the target's own logit
    return factor("all_gather", tp) * (passes * tokens * dim + 2 * (norms * dim * residual + loss))


def heads_over_cp(n_kv_heads: int, tp: int, ulysses: int) -> int:
    """The key/value heads of a rank that attention over cp sends.

    tp shards them; where it has more ranks than there are heads, each rank has one, which others have as well. They are
    repeated until `ulysses` divides them.
    """
    own = max(n_kv_heads // tp, 1)
    return math.lcm(own, ulysses)


def context_bytes(cp: int, ulysses: int, queries: float, keys: float, size: int, layers: int) -> dict[str, float]:
    """Bytes that attention over cp sends, by axis.

    Args:
        queries, keys: elements of a rank's queries, and of its keys and values, these repeated until `ulysses` divides
            their heads. size: bytes of an element.
    """
    ring, sent = cp // ulysses, {"cp_ring": 0.0, "cp_ulysses": 0.0}
    if ulysses > 1:  # queries, keys and values, outputs
        sent["cp_ulysses"] = 2 * layers * factor("all_to_all", ulysses) * (2 * queries + keys) * size
    if ring > 1:  # as large as before: fewer heads of more tokens
        sent["cp_ring"] = layers * keys * (2 * (ring - 1) * size + ring * max(size, 4))
    return sent if 1 < ulysses < cp else {"cp": sum(sent.values())}
