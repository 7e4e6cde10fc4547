"""What one call to a process group costs a rank: the bytes that it sends, by the best algorithm.

With a full buffer of W bytes and n ranks, a rank sends::

    all-reduce        2 (n-1)/n W   ring: reduce-scatter, then all-gather
    all-gather          (n-1)/n W   ring
    reduce-scatter      (n-1)/n W   ring
    all-to-all          all but its own 1/n, directly
    scatter, gather     what is for, or goes to, the root
    broadcast         W             a chain; the last sends nothing
    reduce            W             a chain; the root sends nothing
    send              W
    receive, barrier  0

W is the output of an all-gather, and the input of a reduce-scatter. There is no algorithm by which the busiest rank
sends less. Latency is not counted.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005; Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (the ring; nothing beats it).
"""

from __future__ import annotations

from dataclasses import dataclass

from mmm.layout import UNSHARDED, Layout


@dataclass(frozen=True)
class Call:
    """One call to a process group, as one of its ranks sees it.

    Attributes:
        operation: a row of the table above, such as ``all_reduce``.
        size: number of ranks in the group.
        rank: this rank's number in the group.
        payload: W, in bytes.
        root: the root's number in the group, where there is one; for a send, the receiver's number.
        leaving: bytes that go directly to others, for all_to_all, scatter, gather and send.
    """

    operation: str
    size: int
    rank: int
    payload: int
    root: int = 0
    leaving: int = 0

    def sent(self) -> float:
        """Bytes that this rank sends by the stated algorithm."""
        if self.size == 1:
            return 0.0
        if self.operation in DIRECT:
            return float(self.leaving)
        if self.operation in ("broadcast", "reduce"):
            # A chain, whose last rank sends nothing. A reduce ends at the root, a broadcast at the rank before it.
            last = self.root
            if self.operation == "broadcast":
                last = (self.root - 1) % self.size
            if self.rank == last:
                return 0.0
            return float(self.payload)
        return factor(self.operation, self.size) * self.payload


DIRECT = ("all_to_all", "scatter", "gather", "send", "receive", "barrier")


def factor(operation: str, ranks: int) -> float:
    """Bytes that the busiest rank sends by the stated algorithm, for each byte of the full buffer."""
    if ranks == 1:
        return 0.0
    # A rank keeps 1/n of the buffer, and sends the rest.
    rest = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * rest,
        "all_gather": rest,
        "reduce_scatter": rest,
        "all_to_all": rest,
        "scatter": rest,
        "gather": 1 / ranks,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
        "receive": 0.0,
        "barrier": 0.0,
    }[operation]


def sharded_bytes(
    technique: str,
    layout: Layout,
    local: int,
    padded: int,
    gathered: float,
    shard: float,
) -> dict[str, float]:
    """Bytes that a rank sends in a step to gather parameters and to sum gradients, by data-parallel axis.

    Args:
        technique: the data-parallel technique (`Techniques.data_parallel`).
        local: bytes of a rank's parameters before data parallelism.
        padded: the same, padded until their rows divide over the ranks.
        gathered: under FSDP, bytes of all that a step gathers.
        shard: under FSDP, bytes of a rank's shard of the parameters. (Experts are sharded over more ranks than the
            rest, so that this does not follow from `local`.)
    """
    axis = "dp_shard"
    if layout.cp > 1:
        axis = "dp_shard_cp" if layout.dp_shard > 1 else "cp"
    shards = layout.dp_shard * layout.cp
    if technique not in UNSHARDED:
        return {
            axis: factor("all_gather", shards) * gathered + factor("reduce_scatter", shards) * padded,
            # HSDP sums each shard of the gradients over its replicas.
            "dp_replicate": factor("all_reduce", layout.dp_replicate) * shard,
        }
    ranks = shards
    if layout.dp_replicate > 1:
        axis = "dp_replicate"
        ranks = layout.dp_replicate
    if technique == "zero2":
        summed = factor("reduce_scatter", ranks) * padded
    else:
        summed = factor("all_reduce", ranks) * local
    if technique == "ddp":
        return {axis: summed}
    # ZeRO gathers the parameters that other ranks have updated.
    return {axis: summed + factor("all_gather", ranks) * padded}
