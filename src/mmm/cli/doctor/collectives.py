"""``launch mmm doctor --network``: all-reduces of the ranks inside each host and between hosts, beside the figures that
`mmm plan` counts with.

The bandwidth is that of the bus: 2 (n - 1) / n times the bytes, over the seconds, which does not depend on the number
of ranks n as long as links are the limit, and is what a rank of a ring sends.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmm import units
from mmm.cli.doctor.finding import Finding
from mmm.errors import ConfigError
from mmm.launch.errors import MachineError
from mmm.machines import find
from mmm.machines.machine import Machine

if TYPE_CHECKING:
    import torch

    from mmm.runtime.ranks import Rank

SMALLEST = 8  # bytes, whose time is all latency
SIZES, ON_ACCELERATORS = (1 << 16, 1 << 20, 1 << 24), 1 << 28  # bytes
ROUNDS = 5
SLOW = 0.5  # of the machine's figure
APART = 0.7  # of the median host's rate
SHOWN = 4  # hosts


class Level(NamedTuple):
    """All-reduces of groups of ranks that are alike, all at the same time.

    Attributes:
        name: of the finding. ranks: of a group. groups: what each is called.
        seconds: (group, size), of `SMALLEST` first; of a group's slowest rank.
        together: whether a host's rate is that of all groups, because each has one rank of it.
    """

    name: str
    ranks: int
    groups: list[str]
    seconds: list[list[float]]
    together: bool

    def rates(self, sizes: Sequence[int]) -> list[list[float]]:
        """Bytes/s of the bus, (group or host, size) without the smallest."""
        factor = 2 * (self.ranks - 1) / self.ranks
        rates = [[factor * size / each for size, each in zip(sizes, row[1:], strict=True)] for row in self.seconds]
        return [[sum(column) for column in zip(*rates, strict=True)]] if self.together else rates


def findings(rank: Rank, device: torch.device, site: str | None, timeout: float) -> list[Finding]:
    """What rank 0 has to say; of the others the same. A collective.

    Raises:
        ConfigError: hosts have different numbers of ranks. MachineError: no such machine. On every rank.
    """
    from mmm.runtime.device import backend_for
    from mmm.runtime.process_group import broadcast_object, gather_objects, process_group

    with process_group(rank, device, timeout):
        machine, problem = broadcast_object(_machine(site) if rank.is_main else None)
        if machine is None:
            raise ConfigError(problem, on_every_rank=True)
        hosts: list[str] = broadcast_object(gather_objects(rank, socket.gethostname()))
        names = [*dict.fromkeys(hosts)]
        each = rank.world_size // len(names)
        if hosts != [name for name in names for _ in range(each)]:
            raise ConfigError("--network needs as many ranks on each host, host after host", on_every_rank=True)
        sizes = (*SIZES, *([ON_ACCELERATORS] if device.type != "cpu" else []))
        levels = list(_levels(rank, device, names, each, sizes))
    known = _figures(machine, site is not None, device.type, len(names), rank.world_size)
    return [judged(level, sizes, known, backend_for(device)) for level in levels]


def _levels(rank: Rank, device: Any, names: list[str], each: int, sizes: Sequence[int]) -> Iterator[Level]:
    from torch.distributed.device_mesh import init_device_mesh

    from mmm.runtime.process_group import gather_floats

    mesh = init_device_mesh(device.type, (len(names), each), mesh_dim_names=("host", "local"))
    axes = (("local", "inside a host", each, False), ("host", "between hosts", len(names), True))
    for axis, name, ranks, crosses in axes:
        if ranks == 1:
            continue
        own = [all_reduce_seconds(mesh[axis].get_group(), size, device) for size in (SMALLEST, *sizes)]
        table = gather_floats(own, device)
        members = [range(host * each, (host + 1) * each) for host in range(len(names))]
        if crosses:
            members = [range(local, rank.world_size, each) for local in range(each)]
        slowest = [[max(table[r][s] for r in group) for s in range(len(own))] for group in members]
        yield Level(name, ranks, [f"local rank {i}" for i in range(each)] if crosses else names, slowest, crosses)


def all_reduce_seconds(group: Any, size: int, device: torch.device) -> float:
    """Seconds of an all-reduce of `size` bytes of float32, the median of some. A collective of the group."""
    import torch
    import torch.distributed as dist

    from mmm.runtime.device import synchronize

    buffer = torch.ones(max(1, size // 4), device=device)
    seconds = []
    for _ in range(2 + ROUNDS):  # the first two connect, and warm up
        dist.barrier(group)
        synchronize(device)
        begin = time.monotonic()
        dist.all_reduce(buffer, group=group)
        synchronize(device)
        seconds.append(time.monotonic() - begin)
        buffer.fill_(1.0)
    return statistics.median(seconds[2:])


def _machine(site: str | None) -> tuple[Machine | None, str]:
    """The machine, or what is wrong with it."""
    try:
        return find.find(os.environ, site)[0], ""
    except MachineError as error:
        return None, str(error)


def _figures(machine: Machine, asked: bool, device: str, hosts: int, ranks: int) -> Machine | None:
    """The machine with its rates, as far as they are known: of its file, or measured on this host, unless it was asked
    for by name."""
    try:
        if asked:
            return machine.changed({"hosts": hosts, "ranks_per_host": ranks // hosts})
        return find.machine_here(device, machine.name or None, hosts, ranks)
    except MachineError:
        return None  # its file is one for launch alone


def judged(level: Level, sizes: Sequence[int], machine: Machine | None, backend: str) -> Finding:
    """ok or warn, with the numbers: those of the slowest group, of each size; of hosts together their sum."""
    rates = level.rates(sizes)
    slowest = [min(column) for column in zip(*rates, strict=True)]
    shown = ", ".join(f"{units.size(size)} {rate / 1e9:.3g}" for size, rate in zip(sizes, slowest, strict=True))
    latency = max(row[0] for row in level.seconds)
    groups = len(level.groups)
    what = f"{groups} groups" if level.together else f"{groups} hosts"
    seen = f"{backend}, all-reduce of {level.ranks} ranks" + (f" in {what} at once" if groups > 1 else "")
    seen += (
        f": {SMALLEST} B in {latency * 1e6:,.0f} µs; GB/s of the bus{' of a host' if level.together else ''}: {shown}"
    )
    if machine is None:
        return Finding(level.name, "ok", seen, "no figure to compare with: --site NAME, or mmm machine --measure")
    field, efficiency = (
        ("network_bandwidth", machine.network_efficiency)
        if level.together
        else (
            "link_bandwidth",
            machine.link_efficiency,
        )
    )
    expected = getattr(machine, field) * efficiency
    if not expected:
        return Finding(level.name, "ok", seen, f"no figure to compare with: {machine.name} has no {field}")
    seen += f"; {machine.name}: {expected / 1e9:.3g} ({field} × {efficiency:g})"
    behind = _behind(level, rates)
    if slowest[-1] >= SLOW * expected and not behind:
        return Finding(level.name, "ok", seen)
    advice = f"slow on {behind}: leave it out, or report it" if behind else _advice(level, machine)
    return Finding(level.name, "warn", seen, advice)


def _behind(level: Level, rates: list[list[float]]) -> str:
    """The hosts whose rate is far below the others'; "" for none."""
    last = [row[-1] for row in rates]
    middle = statistics.median(last)
    slow = [name for name, rate in zip(level.groups, last, strict=False) if len(last) > 1 and rate < APART * middle]
    return ", ".join(slow[:SHOWN]) + (f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else "")


def _advice(level: Level, machine: Machine) -> str:
    if level.together and machine.advice:
        return "; ".join(machine.advice)
    say: Callable[[str], str] = "NCCL_DEBUG=INFO says which {} it takes".format
    return (
        say("network") if level.together else f"is the host busy, or are ranks far from their devices? {say('links')}"
    )
