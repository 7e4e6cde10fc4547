"""The bytes that a rank passes to its process groups, counted where PyTorch dispatches them.

::

    with count_traffic(mesh) as traffic:
        ...                       # one step
    traffic.sent                  # bytes, by the algorithms of `collective_bytes`
    traffic.by_axis["tp"]         # of them, those within the tp axis

Every call to a process group passes PyTorch's dispatcher: ``torch.distributed`` calls, point-to-point ones and DDP's
C++ reducer as operators ``c10d::…``; DTensor's as ``_c10d_functional::…``. A dispatch mode sees each before it runs, in
backward too, because autograd's threads inherit the mode. While the mode handles one it is off, so that the ``c10d``
operator below a functional one is not counted again. Nothing is patched. One that `operators` does not know is an
error, not a gap in the sum. PyTorch's own ``CommDebugMode`` counts calls only: no bytes, no groups, no point-to-point.

Every operator of the block passes the mode, which is slower: do not time it. What a compiled function sends is counted
too. Do not count the first two steps: a pipeline sends shapes in the first, DDP its gradient buckets in the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.collective_bytes import Call
from mmm.parallel.mesh import Mesh
from mmm.torch_private.groups import group_of_name
from mmm.torch_private.operators import TorchDispatchMode, schema_arguments
from mmm.traffic.operators import READERS, operator_name


@dataclass
class OperationTraffic:
    """Of one operation within one axis: calls, bytes of the full buffers, and bytes sent."""

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
        entries: by (axis, operation), in the order in which each came first.
    """

    entries: dict[tuple[str, str], OperationTraffic] = field(default_factory=dict)

    def add(self, axis: str, call: Call) -> None:
        self.entries.setdefault((axis, call.operation), OperationTraffic()).add(call)

    @property
    def sent(self) -> int:
        """Bytes, by the algorithms of `collective_bytes`."""
        return round(sum(entry.sent for entry in self.entries.values()))

    @property
    def by_axis(self) -> dict[str, int]:
        """`sent`, by axis of the mesh."""
        total: dict[str, float] = {}
        for (axis, _), entry in self.entries.items():
            total[axis] = total.get(axis, 0.0) + entry.sent
        return {axis: round(count) for axis, count in total.items()}

    def table(self) -> str:
        """A line an operation within an axis."""
        lines = [f"{'axis':14}{'operation':16}{'calls':>7}{'payload':>14}{'sent':>14}"]
        for (axis, operation), e in self.entries.items():
            lines.append(f"{axis:14}{operation:16}{e.calls:7}{e.payload:14,}{e.sent:14,.0f}")
        return "\n".join([*lines, f"{'all':37}{'':14}{self.sent:14,}"])


@contextmanager
def count_traffic(
    mesh: Mesh | DeviceMesh | None = None,
    traffic: Traffic | None = None,
    names: Mapping[tuple[int, ...], str] | None = None,
) -> Iterator[Traffic]:
    """Count what this rank passes to process groups in the ``with`` block.

    Args:
        mesh: its axes, and those of its experts, name the groups by their ranks. dp_shard × cp together is
            ``dp_shard_cp`` (with dp_shard 1: ``cp``, which has the same ranks). Any other group is ``world``, or has
            its ranks for a name.
        traffic: what to add to. names: by the ranks of a group, its axis (`axes_of`), where there is no mesh.

    Raises:
        RuntimeError: an operator on a process group that is not known here.
    """
    names = dict(names or {})
    if mesh is not None:
        mesh = Mesh.of(mesh)
        for axis, group in (*mesh.groups().items(), *(("pp", group) for group in mesh.p2p.values())):
            names.setdefault(_ranks(group), axis)
    traffic = Traffic() if traffic is None else traffic
    with _Count(traffic, names):
        yield traffic


SILENT = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")  # send nothing


class _Count(TorchDispatchMode):
    def __init__(self, traffic: Traffic, names: Mapping[tuple[int, ...], str]) -> None:
        super().__init__()
        self.traffic, self.names, self.axes = traffic, names, dict[str, str]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches operators on plain tensors, which come here
        if func.namespace in ("c10d", "_c10d_functional") and operator_name(func) not in SILENT:
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = READERS.get(operator_name(func))
        if read is None:
            raise RuntimeError(f"{func} on a process group: mmm.traffic.count does not know what it sends")
        arguments = {**dict(zip((a.name for a in schema_arguments(func)), args, strict=False)), **kwargs}
        group = process_group_of(arguments)
        for call in read(arguments, group.size(), group.rank()):
            self.traffic.add(self._axis(group), call)

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self.axes:  # a list of all ranks may be long
            self.axes[group.group_name] = self._find_axis(group)
        return self.axes[group.group_name]

    def _find_axis(self, group: dist.ProcessGroup) -> str:
        ranks = _ranks(group)
        other = "world" if len(ranks) == dist.get_world_size() else "ranks " + " ".join(map(str, ranks))
        return self.names.get(ranks, other)


def process_group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """The group in the arguments of an operator, by name."""
    handle = arguments["process_group"] if "process_group" in arguments else arguments["group_name"]
    if isinstance(handle, str):
        return group_of_name(handle)
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
