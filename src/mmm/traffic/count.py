"""Counts the bytes that a rank passes to its process groups, where PyTorch dispatches them.

::

    with count_traffic(mesh) as traffic:
        ...                       # one step
    traffic.sent                  # bytes, by the algorithms of `collective_bytes`
    traffic.by_axis["tp"]         # of them, those within the tp axis

Every call to a process group passes through PyTorch's dispatcher: ``torch.distributed`` calls, point-to-point calls and
DDP's C++ reducer as operators ``c10d::…``; DTensor's as ``_c10d_functional::…``. A dispatch mode sees each of them
before it runs, also in the backward pass, because autograd's threads inherit the mode. While the mode handles one, it
is off, so that the ``c10d`` operator below a functional one is not counted again. Nothing is patched. An operator that
`operators` does not know is an error, not a gap in the sum. PyTorch's own ``CommDebugMode`` only counts calls: no
bytes, no groups, no point-to-point calls.

Every operator inside the block passes through the mode, which makes it slower: do not time it. What a compiled function
sends is counted as well. Do not count the first two steps: a pipeline sends shapes in the first, DDP its gradient
buckets in the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.collective_bytes import Call
from mmm.parallel.mesh import Mesh
from mmm.torch_private.groups import group_of_name
from mmm.torch_private.operators import schema_arguments
from mmm.traffic.dispatch import PlainTensors
from mmm.traffic.operators import READERS, operator_name


@dataclass
class OperationTraffic:
    """What one operation has sent within one axis.

    Attributes:
        calls: number of calls.
        payload: bytes of the full buffers.
        sent: bytes that this rank has sent.
    """

    calls: int = 0
    payload: int = 0
    sent: float = 0.0

    def add(self, call: Call) -> None:
        self.calls += 1
        self.payload += call.payload
        self.sent += call.sent()


@dataclass
class Traffic:
    """What one rank has sent.

    Attributes:
        entries: (axis, operation) → what it has sent, in the order of the first calls.
    """

    entries: dict[tuple[str, str], OperationTraffic] = field(default_factory=dict)

    def add(self, axis: str, call: Call) -> None:
        entry = self.entries.setdefault((axis, call.operation), OperationTraffic())
        entry.add(call)

    @property
    def sent(self) -> int:
        """Bytes sent in all, by the algorithms of `collective_bytes`."""
        total = sum(entry.sent for entry in self.entries.values())
        return round(total)

    @property
    def by_axis(self) -> dict[str, int]:
        """Axis of the mesh → bytes sent within it."""
        total: dict[str, float] = {}
        for (axis, _), entry in self.entries.items():
            total[axis] = total.get(axis, 0.0) + entry.sent
        return {axis: round(count) for axis, count in total.items()}

    def table(self) -> str:
        """Write a table that has a line for each operation within an axis."""
        lines = [f"{'axis':14}{'operation':16}{'calls':>7}{'payload':>14}{'sent':>14}"]
        for (axis, operation), entry in self.entries.items():
            lines.append(f"{axis:14}{operation:16}{entry.calls:7}{entry.payload:14,}{entry.sent:14,.0f}")
        lines.append(f"{'all':37}{'':14}{self.sent:14,}")
        return "\n".join(lines)


@contextmanager
def count_traffic(
    mesh: Mesh | DeviceMesh | None = None,
    traffic: Traffic | None = None,
    names: Mapping[tuple[int, ...], str] | None = None,
) -> Iterator[Traffic]:
    """Count what this rank passes to process groups in the ``with`` block.

    Args:
        mesh: mesh whose axes, and those of its experts, name the groups by their ranks. dp_shard × cp together is
            ``dp_shard_cp`` (with dp_shard 1: ``cp``, which has the same ranks). Any other group is ``world``, or its
            name is the list of its ranks.
        traffic: what to add to; None: a new `Traffic`.
        names: ranks of a group → its axis (`axes_of`), if there is no mesh.

    Raises:
        RuntimeError: an operator on a process group is unknown here.
    """
    names = dict(names or {})
    if mesh is not None:
        mesh = Mesh.of(mesh)
        for axis, group in mesh.groups().items():
            names.setdefault(_ranks(group), axis)
        # A pipeline sends and receives in groups of its own.
        for group in mesh.p2p.values():
            names.setdefault(_ranks(group), "pp")
    if traffic is None:
        traffic = Traffic()
    with _Count(traffic, names):
        yield traffic


# Operators that send nothing.
SILENT = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")


class _Count(PlainTensors):
    def __init__(self, traffic: Traffic, names: Mapping[tuple[int, ...], str]) -> None:
        super().__init__()
        self.traffic = traffic
        self.names = names
        # Name of a group → its axis. Finding it takes a list of its ranks, which may be long.
        self.axes: dict[str, str] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and operator_name(func) not in SILENT:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = READERS.get(operator_name(func))
        if read is None:
            raise RuntimeError(f"{func} on a process group: mmm.traffic.count does not know what it sends")
        names = [argument.name for argument in schema_arguments(func)]
        arguments = dict(zip(names, args, strict=False))
        arguments.update(kwargs)
        group = process_group_of(arguments)
        for call in read(arguments, group.size(), group.rank()):
            self.traffic.add(self._axis(group), call)

    def _axis(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self.axes:
            self.axes[name] = axis_of_group(group, self.names)
        return self.axes[name]


def axis_of_group(group: dist.ProcessGroup | None, names: Mapping[tuple[int, ...], str]) -> str:
    """The axis that a group lies on; ``world``, or ``ranks 0 2 5``, where it lies on none.

    Args:
        names: ranks of a group → its axis.
    """
    ranks = _ranks(group)
    if ranks in names:
        return names[ranks]
    if len(ranks) == dist.get_world_size():
        return "world"
    return "ranks " + " ".join(map(str, ranks))


def process_group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group in the arguments of an operator.

    Args:
        arguments: name of an argument → its value.
    """
    handle = arguments["process_group"] if "process_group" in arguments else arguments["group_name"]
    # Functional operators name their group; those of c10d have it, boxed as a script object where C++ calls them.
    if isinstance(handle, str):
        return group_of_name(handle)
    if isinstance(handle, dist.ProcessGroup):
        return handle
    return dist.ProcessGroup.unbox(handle)


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
