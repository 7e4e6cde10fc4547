"""What a machine does in a second: matrix products on a device, and collectives between ranks.

The messages of a collective follow each other: n - 1 of them in a ring, first inside a host, then between hosts. An
all-reduce may use a tree, with 2 log2 n messages. The bytes move at the rate of the slowest link on their way. On CPUs,
gloo implements a reduce-scatter as an all-reduce.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mmm.layout import AXES, Layout
from mmm.parallel.collective_bytes import factor
from mmm.runtime.peaks import named_peak
from mmm_launch.errors import MachineError
from mmm_launch.machines.machine import Machine


def peak_rate(machine: Machine, dtype: str) -> float:
    """The most FLOP/s that one device reaches. Raises MachineError if the machine does not give a rate for `dtype`."""
    rate = machine.peak_flops.get(dtype) or named_peak(machine.accelerator, dtype)
    if rate is None:
        raise MachineError(
            f"--dtype {dtype}: machine {machine.name} has no rate for it in peak_flops, and its accelerator is not "
            "known: use another dtype, or --machine FILE"
        )
    return rate


class Group(NamedTuple):
    """The ranks that an axis puts together.

    Attributes:
        size: number of ranks.
        local: the fewest of them that share a host.
        crosses: whether they are on several hosts.
    """

    size: int
    local: int
    crosses: bool


def group_of(size: int, stride: int, machine: Machine) -> Group:
    """The group of `size` ranks whose numbers are `stride` apart. Hosts are filled one after another."""
    if size == 1:
        return Group(1, 1, False)
    # Ranks from the first of the group to the first of its next neighbour.
    span = size * stride
    per_host = machine.ranks_per_host
    # A group lies on one host only if hosts hold a whole number of such spans.
    crosses = machine.hosts > 1 and (span > per_host or per_host % span != 0)
    local = size
    if crosses:
        # The host that has the fewest ranks of a group decides.
        local = max(math.gcd(span, per_host) // stride, 1)
    return Group(size, local, crosses)


def groups_of(layout: Layout, machine: Machine, ulysses: int = 1) -> dict[str, Group]:
    """The group of each axis; also of ``ep``, of ``fsdp`` (dp_shard and cp together), and of the two axes of usp."""
    groups: dict[str, Group] = {}
    stride = 1
    # The innermost axis has neighbouring ranks, and so stride 1.
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        groups[axis] = group_of(size, stride, machine)
        stride *= size
    groups["fsdp"] = group_of(layout.dp_shard * layout.cp, layout.tp, machine)
    groups["cp_ulysses"] = group_of(ulysses, layout.tp, machine)
    groups["cp_ring"] = group_of(layout.cp // ulysses, layout.tp * ulysses, machine)
    groups["ep"] = group_of(layout.ep, layout.tp * layout.cp, machine)
    return groups


def collective(
    operation: str,
    group: Group,
    size: float,
    machine: Machine,
    calls: int = 1,
) -> float:
    """Seconds that some collectives take.

    Args:
        operation: a key of `mmm.parallel.collective_bytes.factor`.
        size: bytes of the full buffers of all calls together.
        calls: number of collectives.
    """
    if group.size == 1:
        return 0.0
    if operation == "reduce_scatter" and machine.device == "cpu":
        operation = "all_reduce"
    # A ring visits all ranks of a host before it goes to the next host.
    hosts = group.size // group.local if group.crosses else 1
    latency = (group.local - 1) * machine.link_latency + (hosts - 1) * machine.network_latency
    if operation == "all_to_all":
        # The fractions of its buffer that a rank sends to ranks on its own host, and to those on others.
        inside = (group.local - 1) / group.size
        outside = (group.size - group.local) / group.size if group.crosses else 0.0
        seconds = calls * latency + inside * size / machine.bandwidth(1, False)
        if outside:
            seconds += outside * size / machine.bandwidth(1, True)
        return seconds
    if operation == "all_reduce":
        tree = 2 * (math.log2(group.local) * machine.link_latency + math.log2(hosts) * machine.network_latency)
        latency = min(2 * latency, tree)
    return calls * latency + factor(operation, group.size) * size / machine.bandwidth(group.local, group.crosses)


def send(size: float, group: Group, machine: Machine) -> float:
    """Seconds that one message of `size` bytes takes to the next rank of a group."""
    latency = machine.link_latency
    if group.crosses:
        latency = machine.network_latency
    return size / machine.bandwidth(1, group.crosses) + latency
