"""A dry run's steps as files: Chakra's, which network simulators read, and Perfetto's, which people look at.

``NAME.<rank>.et`` is a rank's step, ``NAME.json`` the members of the groups in it, as ASTRA-sim wants both, and
``NAME.<rank>.perfetto.json`` the same step on a time axis.

Seconds come from a machine model, where there is one: of a kernel the longer of its FLOPs at the peak times the
efficiency of matrix products and its bytes at the memory's bandwidth, of a call `mmm.plan.network`'s formulas. A node
begins when all that it waits for has ended; other ranks are always ready, so there is no bubble. Without a machine each
node takes 1 µs: the picture then shows order, not time, and Chakra's files have no durations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError
from mmm.plan import chakra
from mmm.plan.dry_run import DryRun, RankReport, stands_for
from mmm.plan.machine import Machine
from mmm.plan.network import Group, collective, send
from mmm.plan.step_graph import Communication, Node
from mmm.traffic.count import axes_of

NO_TIME = 1e-6  # seconds, for pictures


def seconds_of(node: Node, machine: Machine | None, precision: str) -> float:
    """How long a node takes once it has begun."""
    if machine is None:
        return NO_TIME
    if node.communication is None:
        products = node.flops / (machine.peak(precision) * machine.matmul_efficiency)
        return max(products, (node.read + node.written) / (machine.memory_bandwidth * machine.memory_efficiency))
    ranks, call = node.communication.ranks, node.communication.sent.call
    hosts = [rank // machine.gpus_per_host for rank in ranks]
    crosses = len({*hosts}) > 1
    if node.communication.peer >= 0:
        own = ranks[call.rank] // machine.gpus_per_host
        apart = own != node.communication.peer // machine.gpus_per_host
        return send(call.payload, Group(2, 1 if apart else 2, apart), machine)
    local = min(hosts.count(host) for host in {*hosts})
    return collective(call.operation, Group(call.size, local, crosses), call.payload, machine)


def timeline(nodes: Iterable[Node], machine: Machine | None, precision: str) -> list[tuple[float, float]]:
    """Begin and duration of each node, in seconds."""
    found = list[tuple[float, float]]()
    for node in nodes:
        begin = max((sum(found[at]) for at in (*node.data, *node.order)), default=0.0)
        found.append((begin, seconds_of(node, machine, precision)))
    return found


def write(found: DryRun, path: Path, machine: Machine | None = None, every_rank: bool = False) -> list[Path]:
    """Write the files; their names begin with that of `path`.

    Args:
        every_rank: also those of the ranks that `found` does not have, which do what one that it has does, in groups of
            their own.
    """
    reports = list(_every_rank(found) if every_rank else found.ranks)
    groups = {group: number for number, group in enumerate(sorted({*_groups(reports)}), start=1)}
    written = [path.with_name(f"{path.name}.json")]
    written[0].write_text(json.dumps({str(number): list(group) for group, number in groups.items()}) + "\n")
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for report in reports:
        kind = stands_for(report.coordinates)
        if kind not in times:
            times[kind] = timeline(report.nodes, machine, report.precision)
        names = [path.with_name(f"{path.name}.{report.rank}.{end}") for end in ("et", "perfetto.json")]
        names[0].write_bytes(_chakra(report, times[kind], groups, machine))
        names[1].write_text(json.dumps(_perfetto(report, times[kind], machine)) + "\n")
        written += names
    return written


def _groups(reports: Iterable[RankReport]) -> Iterator[tuple[int, ...]]:
    for report in reports:
        yield from (node.communication.ranks for node in report.nodes if node.communication is not None)


def _chakra(
    report: RankReport,
    times: list[tuple[float, float]],
    groups: dict[tuple[int, ...], int],
    machine: Machine | None,
) -> bytes:
    messages = []
    for number, (node, (begin, duration)) in enumerate(zip(report.nodes, times, strict=True)):
        kind, attributes = chakra.COMPUTE, dict[str, chakra.Value]()
        if node.communication is None:
            # A simulator's roofline needs operations: where there are no products, one for each element.
            attributes |= {"num_ops": node.flops or node.elements, "tensor_size": node.read + node.written}
        else:
            kind, attributes = _communication(report.rank, node.communication, groups)
        attributes |= {"is_cpu_op": False, "stream": node.stream, "phase": node.doing}
        when = (0, 0) if machine is None else (round(begin * 1e6), round(duration * 1e6))
        messages.append(chakra.node(number, node.name, kind, node.order, node.data, *when, attributes))
    about: dict[str, chakra.Value] = {"rank": report.rank, "layout": report.layout, "precision": report.precision}
    return chakra.file_of(messages, about | ({} if machine is None else {"machine": machine.name}))


def _communication(
    rank: int, communication: Communication, groups: dict[tuple[int, ...], int]
) -> tuple[int, dict[str, chakra.Value]]:
    sent, call = communication.sent, communication.sent.call
    # Simulators want what a rank puts in, and an all-gather's payload is what comes out.
    size = call.payload // call.size if call.operation in ("all_gather", "gather") else call.payload
    attributes: dict[str, chakra.Value] = {
        "comm_size": size,
        "pg_name": str(groups[communication.ranks]),
        "operation": call.operation,
        "axis": sent.axis,
        "payload_bytes": call.payload,
        "sent_bytes": round(call.sent()),
    }
    if communication.peer < 0:
        return chakra.COLLECTIVE, {"comm_type": chakra.OPERATIONS[call.operation]} | attributes
    ends = (rank, communication.peer) if call.operation == "send" else (communication.peer, rank)
    attributes |= {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": communication.tag}
    return chakra.SEND if call.operation == "send" else chakra.RECEIVE, attributes


def _perfetto(report: RankReport, times: list[tuple[float, float]], machine: Machine | None) -> dict[str, Any]:
    threads: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for number, (node, (begin, duration)) in enumerate(zip(report.nodes, times, strict=True)):
        sizes: dict[str, Any] = {"node": number, "phase": node.doing, "read": node.read, "written": node.written}
        name, stream = node.name, node.stream
        if node.communication is None:
            sizes["flops"] = node.flops
        else:
            call = node.communication.sent.call
            name = f"{call.operation} {stream}"
            sizes = {"node": number, "phase": node.doing, "axis": stream, "ranks": call.size}
            sizes |= {"payload_bytes": call.payload, "sent_bytes": round(call.sent()), "operator": node.name}
            if node.communication.peer >= 0:
                sizes["peer"] = node.communication.peer
                stream = f"{stream} {call.operation}"
        sizes["waits_for"] = [*node.data, *node.order]
        thread = threads.setdefault(stream, len(threads))
        shape = {"ph": "X", "pid": report.rank, "tid": thread, "ts": begin * 1e6, "dur": duration * 1e6}
        events.append({"name": name, "cat": node.doing, **shape, "args": sizes})
    names = [{"name": "process_name", "ph": "M", "pid": report.rank, "args": {"name": f"rank {report.rank}"}}]
    for stream, thread in threads.items():
        about = {"name": "thread_name", "ph": "M", "pid": report.rank, "tid": thread, "args": {"name": stream}}
        names.append(about)
    durations = "1 µs each: no machine is given" if machine is None else f"predicted for {machine.name}"
    other = {"layout": report.layout, "precision": report.precision, "durations": durations}
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": other}


def _every_rank(found: DryRun) -> Iterator[RankReport]:
    tried = {stands_for(report.coordinates): report for report in found.ranks}
    for rank in range(found.world_size):
        first = tried[stands_for(found.ranks[0].sizes.coordinates(rank))]
        yield first if first.rank == rank else as_rank(first, rank)


def as_rank(report: RankReport, rank: int) -> RankReport:
    """What `rank`, for which `report` stands, does: the same in its own groups."""
    layout = report.sizes
    own = {axis: ranks for ranks, axis in axes_of(layout, rank, report.experts).items()}

    def moved(node: Node) -> Node:
        there = node.communication
        if there is None:
            return node
        axis, call = there.sent.axis, there.sent.call
        if len(there.ranks) == layout.ranks:
            ranks = there.ranks
        elif axis in own:
            ranks = own[axis]
        else:
            raise ConfigError(f"trace of rank {rank}: its group for {axis} of rank {report.rank} is not known")
        at = ranks.index(rank)
        peer = there.peer if there.peer < 0 else ranks[(at + there.ranks.index(there.peer) - call.rank) % call.size]
        sent = replace(there.sent, call=replace(call, rank=at))
        return replace(node, communication=replace(there, sent=sent, ranks=ranks, peer=peer))

    nodes = [moved(node) for node in report.nodes]
    return replace(report, rank=rank, coordinates=layout.coordinates(rank), nodes=nodes)
