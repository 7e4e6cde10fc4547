"""The bytes that a rank passes to its process groups, counted where PyTorch dispatches them.

::

    with count_traffic(mesh) as traffic:
        ...                       # one step
    traffic.sent                  # bytes, by the stated algorithms
    traffic.by_axis["tp"]         # of them, those within the tp axis

Every call to a process group passes PyTorch's dispatcher: ``torch.distributed`` calls, point-to-point ones and DDP's
C++ reducer as operators ``c10d::…``; DTensor's as ``_c10d_functional::…``. A dispatch mode sees each before it runs, in
backward too, because autograd's threads inherit the mode. While the mode handles one it is off, so that the ``c10d``
operator below a functional one is not counted again. Nothing is patched. An operator that this file does not know is an
error, not a gap in the sum. PyTorch's own ``CommDebugMode`` counts calls only: no bytes, no groups, no point-to-point.

Every operator of the block passes the mode, which is slower: do not time it. What a compiled function sends is counted
too. Do not count the first two steps: a pipeline sends shapes in the first, DDP its gradient buckets in the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.layout import CP_AXES, Layout
from mmm.parallel.mesh import Mesh
from mmm.torch_private.groups import group_of_name
from mmm.torch_private.operators import TorchDispatchMode, schema_arguments, schema_name, tree_leaves
from mmm.traffic.collective_bytes import Call


@dataclass
class OperationTraffic:
    """Of one operation within one axis: calls, bytes of the full buffers, and bytes sent, stated and by gloo."""

    calls: int = 0
    payload: int = 0
    sent: float = 0.0
    wire: float = 0.0

    def add(self, call: Call, on_gloo: bool) -> None:
        self.calls += 1
        self.payload += call.payload
        self.sent += call.sent()
        self.wire += call.wire() if on_gloo else 0.0


@dataclass
class Traffic:
    """What one rank has sent.

    Attributes:
        entries: by (axis, operation), in the order in which each came first.
    """

    entries: dict[tuple[str, str], OperationTraffic] = field(default_factory=dict)

    def add(self, axis: str, call: Call, on_gloo: bool) -> None:
        self.entries.setdefault((axis, call.operation), OperationTraffic()).add(call, on_gloo)

    @property
    def sent(self) -> int:
        """Bytes, by the stated algorithms (`collective_bytes`)."""
        return round(sum(entry.sent for entry in self.entries.values()))

    @property
    def wire(self) -> int:
        """Bytes, by the algorithms of gloo, with its headers; of CPU tensors only, which are what gloo sends."""
        return round(sum(entry.wire for entry in self.entries.values()))

    @property
    def by_axis(self) -> dict[str, int]:
        """`sent`, by axis of the mesh."""
        total: dict[str, float] = {}
        for (axis, _), entry in self.entries.items():
            total[axis] = total.get(axis, 0.0) + entry.sent
        return {axis: round(count) for axis, count in total.items()}

    def table(self) -> str:
        """A line an operation within an axis."""
        lines = [f"{'axis':14}{'operation':16}{'calls':>7}{'payload':>14}{'sent':>14}{'gloo':>14}"]
        for (axis, operation), e in self.entries.items():
            lines.append(f"{axis:14}{operation:16}{e.calls:7}{e.payload:14,}{e.sent:14,.0f}{e.wire:14,.0f}")
        return "\n".join([*lines, f"{'all':37}{'':14}{self.sent:14,}{self.wire:14,}"])


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


def axes_of(layout: Layout, rank: int, experts: bool = False, ulysses: int = 1) -> dict[tuple[int, ...], str]:
    """By the ranks of each group that a rank is in on a mesh of `layout`, its axis; needs no process group.

    Args:
        experts: as of `build_mesh`. ulysses: as of `Mesh.split_cp`.
    """
    ranks = np.arange(layout.ranks).reshape(list(layout.sizes.values()))  # (pp, dp_replicate, dp_shard, cp, tp)
    coordinates = list(layout.coordinates(rank).values())

    def along(table: np.ndarray, place: Sequence[int], *dims: int) -> tuple[int, ...]:
        index = tuple(slice(None) if dim in dims else where for dim, where in enumerate(place))
        return tuple(sorted(table[index].flatten().tolist()))

    axes: dict[tuple[int, ...], str] = {}
    for dim, (axis, size) in enumerate(layout.sizes.items()):
        if size > 1 or axis == "dp_shard":
            axes.setdefault(along(ranks, coordinates, dim), axis)
    if layout.cp > 1:
        axes.setdefault(along(ranks, coordinates, 2, 3), "dp_shard_cp")
        split = ranks.reshape(*ranks.shape[:3], layout.cp // ulysses, ulysses, layout.tp)
        place = [*coordinates[:3], *divmod(coordinates[3], ulysses), coordinates[4]]
        for dim, axis in enumerate(CP_AXES if 1 < ulysses < layout.cp else ()):
            axes.setdefault(along(split, place, 3 + dim), axis)
    if layout.ep == 1 and not (experts and layout.tp > 1):
        return axes
    pp, dp_replicate, dp_shard, cp, tp = layout.sizes.values()
    by_expert = ranks.reshape(pp, dp_replicate, dp_shard // layout.ep, layout.ep, cp, tp)
    coordinates[2:3] = divmod(coordinates[2], layout.ep)
    axes.setdefault(along(by_expert, coordinates, 2, 4, 5), "expert_dp")
    axes.setdefault(along(by_expert, coordinates, 3), "ep")
    return axes


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
        on_gloo = all(tensor.device.type == "cpu" for tensor in _tensors(list(arguments.values())))
        for call in read(arguments, group.size(), group.rank()):
            self.traffic.add(self._axis(group), call, on_gloo)

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self.axes:  # a list of all ranks may be long
            self.axes[group.group_name] = self._find_axis(group)
        return self.axes[group.group_name]

    def _find_axis(self, group: dist.ProcessGroup) -> str:
        ranks = _ranks(group)
        other = "world" if len(ranks) == dist.get_world_size() else "ranks " + " ".join(map(str, ranks))
        return self.names.get(ranks, other)


def operator_name(func: Any) -> str:
    """``allreduce`` of ``c10d::allreduce_``; a functional operator's has its own underscores."""
    return schema_name(func).split("::")[1].strip("_").removesuffix("_out")


def process_group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """The group in the arguments of an operator, by name."""
    handle = arguments["process_group"] if "process_group" in arguments else arguments["group_name"]
    if isinstance(handle, str):
        return group_of_name(handle)
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def _bytes(nested: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(nested))


# One function an operation, for both namespaces, which differ in the names of arguments and in who makes the output:
# (arguments, size of the group, this rank's number in it) → the calls to count.
Reader = Callable[[Mapping[str, Any], int, int], list[Call]]


def _reader(operation: str, *names: str, by_parts: bool = False) -> Reader:
    """Of an operation whose full buffer is the first of the named arguments; `by_parts`: 1 / size of it is."""

    def read(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
        buffer = next(arguments[name] for name in names if name in arguments)
        root = arguments.get("root_rank", arguments.get("src", 0))
        payload = _bytes(buffer) * (size if by_parts else 1)
        return [Call(operation, size, rank, payload, root=root, tensors=len(_tensors(buffer)))]

    return read


def _gather_lists(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    local = arguments["input_tensors"] if "input_tensors" in arguments else arguments["input_list"]
    return [Call("all_gather", size, rank, _bytes(local) * size, tensors=len(local))]


def _all_to_all_single(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    buffer = arguments["input"]
    rows = list(arguments.get("input_split_sizes") or arguments.get("in_splits") or [])
    own = rows[rank] * math.prod(buffer.shape[1:]) if rows else buffer.numel() / size
    payload = _bytes(buffer)
    return [Call("all_to_all", size, rank, payload, leaving=round(payload - own * buffer.element_size()))]


def _all_to_all(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    parts = arguments["input_tensors"]
    return [Call("all_to_all", size, rank, _bytes(parts), leaving=_bytes(parts) - _bytes(parts[rank]))]


def _gather(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    local, root = _bytes(arguments["input_tensors"]), arguments["root_rank"]
    return [Call("gather", size, rank, local * size, root=root, leaving=0 if rank == root else local)]


def _scatter(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    local, root = _bytes(arguments["output_tensors"]), arguments["root_rank"]
    return [Call("scatter", size, rank, local * size, root=root, leaving=local * (size - 1) if rank == root else 0)]


def _send(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    count = _bytes(arguments["tensors"] if "tensors" in arguments else arguments["tensor"])
    return [Call("send", size, rank, count, root=arguments.get("dst", 0), leaving=count)]


def _receive(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    return [
        Call("receive", size, rank, _bytes(arguments["tensors"] if "tensors" in arguments else arguments["tensor"]))
    ]


def _batch_p2p(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    calls = []
    for operation, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
        calls += (_send if operation == "isend" else _receive)({"tensor": tensor}, size, rank)
    return calls


READERS: dict[str, Reader] = {
    # c10d
    "allreduce": _reader("all_reduce", "tensors"),
    "allreduce_coalesced": _reader("all_reduce", "tensors"),
    "broadcast": _reader("broadcast", "tensors", "input"),
    "reduce": _reader("reduce", "tensors"),
    "allgather": _gather_lists,
    "allgather_base": _reader("all_gather", "output_tensor"),
    "allgather_coalesced": _gather_lists,
    "allgather_into_tensor_coalesced": _reader("all_gather", "outputs"),
    "reduce_scatter": _reader("reduce_scatter", "input_tensors"),
    "reduce_scatter_base": _reader("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced": _reader("reduce_scatter", "inputs"),
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _receive,
    "recv_any_source": _receive,
    "barrier": lambda arguments, size, rank: [Call("barrier", size, rank, 0)],
    "monitored_barrier": lambda arguments, size, rank: [Call("barrier", size, rank, 0)],
    # _c10d_functional
    "all_reduce": _reader("all_reduce", "input"),
    "all_reduce_coalesced": _reader("all_reduce", "inputs"),
    "all_gather_into_tensor": _reader("all_gather", "input", by_parts=True),
    "all_gather_into_tensor_coalesced": _reader("all_gather", "inputs", by_parts=True),
    "reduce_scatter_tensor": _reader("reduce_scatter", "input"),
    "all_to_all_single": _all_to_all_single,
    "isend": _send,
    "irecv": _receive,
    "batch_p2p_ops": _batch_p2p,
}
SILENT = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")  # send nothing
