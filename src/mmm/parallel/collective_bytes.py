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
