"""What one call to a process group costs a rank: bytes it sends, by the best algorithm, and by the one gloo has.

With W the bytes of the full buffer and n ranks, a rank sends::

                      stated algorithm                       gloo (torch 2.13)
    all-reduce        2 (n-1)/n W   ring: reduce-scatter,    the same
                                    then all-gather
    all-gather          (n-1)/n W   ring                     the same
    reduce-scatter      (n-1)/n W   ring                     2 (n-1)/n W: an all-reduce, of which 1/n is kept
    all-to-all          all but its own 1/n, directly        the same
    scatter, gather     what is for, or goes to, the root    the same
    broadcast         W             a chain; the last sends  W for each child in a binomial tree: the root ⌈log₂ n⌉ W
                                    nothing
    reduce            W             a chain; the root sends  W, and the root (n-1)/n W: a ring reduce-scatter, then a
                                    nothing                  gather
    send              W                                      the same
    receive, barrier  0                                      the same

W is an all-gather's output, a reduce-scatter's input. With no algorithm does the busiest rank send less; latency is not
counted. Besides, gloo adds 96 bytes to every message that it sends and 48 to every one that it receives, and its rings
split the buffer in two; the right column includes that. A test (test_wire.py) compares it with the bytes that
the kernel counts on a rank's sockets.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005; Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (the ring; nothing beats it).
"""

from __future__ import annotations

from dataclasses import dataclass

SEND, RECEIVE = 96, 48  # bytes that gloo adds to a message on the sender, and on the receiver


@dataclass(frozen=True)
class Call:
    """One call to a process group, as one of its ranks sees it.

    Attributes:
        operation: a row of the table above, such as ``all_reduce``.
        size: ranks of the group. rank: this one's number in it. root: that of the root, where there is one; of a
            send, the receiver's.
        payload: W, in bytes.
        leaving: bytes sent to others directly, for all_to_all, scatter, gather and send.
        tensors: of the call, to each of which gloo adds its bytes.
    """

    operation: str
    size: int
    rank: int
    payload: int
    root: int = 0
    leaving: int = 0
    tensors: int = 1

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

    def wire(self) -> float:
        """Bytes that this rank sends by gloo, with the headers of its messages."""
        n, operation = self.size, self.operation
        if n == 1:
            return 0.0
        hops = (n - 1) * 2 * (SEND + RECEIVE)  # once round the ring, in halves
        is_root = self.rank == self.root
        if operation in ("all_reduce", "reduce_scatter"):
            return factor("all_reduce", n) * self.payload + 2 * hops * self.tensors
        if operation == "all_gather":
            return factor("all_gather", n) * self.payload + hops * self.tensors
        if operation == "broadcast":
            place = (self.rank - self.root) % n
            children = sum(place < 1 << k and place + (1 << k) < n for k in range(n.bit_length()))
            return children * (self.payload + SEND) + RECEIVE * (not is_root)
        if operation == "reduce":
            return (n - 1) / n * self.payload + hops + (RECEIVE * (n - 1) if is_root else self.payload / n + SEND)
        if operation == "barrier":
            return float((n - 1).bit_length() * (SEND + RECEIVE))
        messages = {
            "all_to_all": (n - 1) * (SEND + RECEIVE),
            "scatter": (n - 1) * SEND if is_root else RECEIVE,
            "gather": (n - 1) * RECEIVE if is_root else SEND,
            "send": SEND,
            "receive": RECEIVE,
        }
        return float(self.leaving + messages[operation])


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
