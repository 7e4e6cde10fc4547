"""What gloo sends, as `collective_bytes` works it out, against the kernel's count of this rank's sockets."""

import socket

import pytest
import torch
import torch.distributed as dist

from mmm.runtime.process_group import all_gather, reduce_scatter
from mmm.traffic.collective_bytes import RECEIVE, Call, factor
from mmm.traffic.count import count_traffic
from mmm.traffic.step_table import sent_since, socket_bytes

CPU = torch.device("cpu")


def calls(n: int, rank: int, part: int):
    """Every operation on buffers whose parts have `part` numbers, by name."""

    def new(parts: int = n) -> torch.Tensor:
        return torch.ones(parts * part)

    def ring() -> None:
        pair = [dist.P2POp(dist.isend, new(), (rank + 1) % n), dist.P2POp(dist.irecv, new(), (rank - 1) % n)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    root = n - 1
    parts = [new(1) for _ in range(n)]
    return {
        "all_reduce": lambda: dist.all_reduce(new()),
        "all_gather": lambda: all_gather(new(), new(1)),
        "all_gather, lists": lambda: dist.all_gather(parts, new(1)),
        "reduce_scatter": lambda: reduce_scatter(new(1), new()),
        "reduce_scatter, lists": lambda: dist.reduce_scatter(new(1), parts),
        "broadcast": lambda: dist.broadcast(new(), src=root),
        "reduce": lambda: dist.reduce(new(), dst=root),
        "all_to_all": lambda: dist.all_to_all_single(new(), new()),
        "scatter": lambda: dist.scatter(new(1), parts if rank == root else None, src=root),
        "gather": lambda: dist.gather(new(1), parts if rank == root else None, dst=root),
        "send, receive": ring,
        "barrier": dist.barrier,
    }


def measured(work, mesh=None) -> tuple[int, int]:
    """(computed, sent by the sockets): of `work`, and of a barrier after which nothing is on its way."""
    dist.barrier()
    before = socket_bytes()
    with count_traffic(mesh) as traffic:
        work()
        dist.barrier()
    sent = sent_since(before)
    dist.barrier()  # until all have looked: a rank that leaves closes its end, and with it ours
    return traffic.wire, sent


def each_call(rank, part: int, times: int):
    def repeated(call):
        return lambda: [call() for _ in range(times)]

    return {name: measured(repeated(call)) for name, call in calls(rank.world_size, rank.rank, part).items()}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("part", "times"), [(60, 50), (1 << 16, 1)], ids=["headers", "payload"])
def test_gloo_sends_what_is_worked_out(run_on_ranks, ranks, part, times):
    """Many small messages, mostly headers, and few large ones. gloo's own thread may send the last headers of what was
    before only after the sockets have been read: a few are allowed for."""
    for rank, found in enumerate(run_on_ranks(each_call, ranks, part, times)):
        for name, (worked_out, sent) in found.items():
            assert worked_out == pytest.approx(sent, rel=0.01, abs=4 * RECEIVE), (name, rank)


def test_sockets_are_counted_exactly():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed, ours = (socket.create_connection(server.getsockname()) for _ in range(2))
        with ours, server.accept()[0] as first, server.accept()[0] as second:
            closed.sendall(bytes(777))
            assert len(first.recv(777, socket.MSG_WAITALL)) == 777
            before = socket_bytes()
            ours.sendall(bytes(12_345))
            assert len(second.recv(12_345, socket.MSG_WAITALL)) == 12_345
            closed.close()
            assert sent_since(before) == 12_345


def test_stated_algorithms():
    """No rank sends more than the factor says, and all together move what has to be moved."""
    n, whole = 4, 4800

    def sent(operation: str, **more) -> list[float]:
        return [Call(operation, n, rank, whole, root=1, **more).sent() for rank in range(n)]

    assert sent("all_reduce") == [7200.0] * n
    assert sent("all_gather") == sent("reduce_scatter") == [3600.0] * n
    assert sent("broadcast") == [0.0, 4800.0, 4800.0, 4800.0]  # the chain 1 2 3 0
    assert sent("reduce") == [4800.0, 0.0, 4800.0, 4800.0]
    assert sent("all_to_all", leaving=3600) == [3600.0] * n
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        assert max(sent(operation)) == factor(operation, n) * whole
        assert Call(operation, 1, 0, whole).sent() == Call(operation, 1, 0, whole).wire() == 0
