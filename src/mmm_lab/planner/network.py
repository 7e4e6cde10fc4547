"""What a machine does a second: products on a device, and collectives of ranks that share a host or do not.

Messages of a collective go one after the other: n - 1 in a ring, first inside a host, then between hosts; an all-reduce
may take a tree, 2 log2 n. Its bytes go at the rate of the slowest link that they pass. gloo, on CPUs, makes an
all-reduce of a reduce-scatter.

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
    """FLOP/s of one device at most. Raises MachineError: the machine has no such rate."""
    rate = machine.peak_flops.get(dtype) or named_peak(machine.accelerator, dtype)
    if rate is None:
        raise MachineError(
            f"--dtype {dtype}: machine {machine.name} has no rate for it in peak_flops, and no accelerator that is "
            "known: use another, or --machine FILE"
        )
    return rate


class Group(NamedTuple):
    """Ranks of an axis: how many, how many of them at least on a host, and whether they are on several."""

    size: int
    local: int
    crosses: bool


def group_of(size: int, stride: int, machine: Machine) -> Group:
    """A group of `size` ranks, `stride` apart; host after host has `Machine.ranks_per_host` ranks."""
    span, each = size * stride, machine.ranks_per_host
    if size == 1:
        return Group(1, 1, False)
    crosses = machine.hosts > 1 and (span > each or each % span != 0)
    return Group(size, max(math.gcd(span, each) // stride, 1) if crosses else size, crosses)


def groups_of(layout: Layout, machine: Machine, ulysses: int = 1) -> dict[str, Group]:
    """Of each axis, of ``ep``, of ``fsdp``: dp_shard and cp as one; and of the two that usp makes of cp."""
    found, stride = {}, 1
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        found[axis] = group_of(size, stride, machine)
        stride *= size
    found["fsdp"] = group_of(layout.dp_shard * layout.cp, layout.tp, machine)
    found["cp_ulysses"] = group_of(ulysses, layout.tp, machine)
    found["cp_ring"] = group_of(layout.cp // ulysses, layout.tp * ulysses, machine)
    found["ep"] = group_of(layout.ep, layout.tp * layout.cp, machine)
    return found


def collective(operation: str, group: Group, size: float, machine: Machine, calls: int = 1) -> float:
    """Seconds of `calls` collectives on buffers of `size` bytes together.

    Args:
        operation: a key of `mmm.parallel.collective_bytes.factor`. size: of the full buffers.
    """
    if group.size == 1:
        return 0.0
    if operation == "reduce_scatter" and machine.device == "cpu":
        operation = "all_reduce"
    hosts = group.size // group.local if group.crosses else 1
    ring = (group.local - 1) * machine.link_latency + (hosts - 1) * machine.network_latency
    if operation == "all_to_all":
        outside = (group.size - group.local) / group.size if group.crosses else 0.0
        inside = (group.local - 1) / group.size
        network = machine.network_bandwidth * machine.network_efficiency / machine.ranks_per_host
        seconds = inside * size / (machine.link_bandwidth * machine.link_efficiency)
        return calls * ring + seconds + (outside * size / network if outside else 0.0)
    if operation == "all_reduce":
        tree = 2 * (math.log2(group.local) * machine.link_latency + math.log2(max(hosts, 1)) * machine.network_latency)
        ring = min(2 * ring, tree)
    return calls * ring + factor(operation, group.size) * size / machine.bandwidth(group.local, group.crosses)


def send(size: float, group: Group, machine: Machine) -> float:
    """Seconds of one message of `size` bytes to the next rank of a group."""
    if group.crosses:
        rate = machine.network_bandwidth * machine.network_efficiency / machine.ranks_per_host
        return size / rate + machine.network_latency
    return size / (machine.link_bandwidth * machine.link_efficiency) + machine.link_latency
