"""What an operator on a process group sends, by its arguments; and the axis that a group is, by its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mmm.layout import CP_AXES, Layout
from mmm.parallel.collective_bytes import Call
from mmm.torch_private.operators import schema_name, tree_leaves


def operator_name(func: Any) -> str:
    """``allreduce`` of ``c10d::allreduce_``; a functional operator's has its own underscores."""
    return schema_name(func).split("::")[1].strip("_").removesuffix("_out")


def tensors_in(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def _bytes(nested: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(nested))


# One function an operation, for both namespaces, which differ in the names of arguments and in who makes the output:
# (arguments, size of the group, this rank's number in it) → the calls to count.
Reader = Callable[[Mapping[str, Any], int, int], list[Call]]


def _reader(operation: str, *names: str, by_parts: bool = False) -> Reader:
    """Of an operation whose full buffer is the first of the named arguments; `by_parts`: 1 / size of it is."""

    def read(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
        buffer = next(arguments[name] for name in names if name in arguments)
        root = arguments.get("root_rank", arguments.get("src", 0))
        payload = _bytes(buffer) * (size if by_parts else 1)
        return [Call(operation, size, rank, payload, root=root)]

    return read


def _gather_lists(arguments: Mapping[str, Any], size: int, rank: int) -> list[Call]:
    local = arguments["input_tensors"] if "input_tensors" in arguments else arguments["input_list"]
    return [Call("all_gather", size, rank, _bytes(local) * size)]


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


def axes_of(layout: Layout, rank: int, experts: bool = False, ulysses: int = 1) -> dict[tuple[int, ...], str]:
    """By the ranks of each group that a rank is in on a mesh of `layout`, its axis; needs no process group.

    Args:
        experts: as of `build_mesh`. ulysses: as of `Mesh.split_cp`.
    """
    sizes = layout.sizes  # pp, dp_replicate, dp_shard, cp, tp: outermost first
    axes: dict[tuple[int, ...], str] = {}
    for axis, size in sizes.items():
        if size > 1 or axis == "dp_shard":
            axes.setdefault(_ranks_along(sizes, rank, axis), axis)
    if layout.cp > 1:
        axes.setdefault(_ranks_along(sizes, rank, "dp_shard", "cp"), "dp_shard_cp")
    if 1 < ulysses < layout.cp:
        split = _split(sizes, "cp", CP_AXES, ulysses)
        for axis in CP_AXES:
            axes.setdefault(_ranks_along(split, rank, axis), axis)
    if layout.ep > 1 or (experts and layout.tp > 1):
        by_expert = _split(sizes, "dp_shard", ("expert_dp", "ep"), layout.ep)
        axes.setdefault(_ranks_along(by_expert, rank, "expert_dp", "cp", "tp"), "expert_dp")
        axes.setdefault(_ranks_along(by_expert, rank, "ep"), "ep")
    return axes


def _split(sizes: Mapping[str, int], axis: str, names: tuple[str, str], inner: int) -> dict[str, int]:
    """The sizes with one axis as two, the inner one of `inner` ranks."""
    split: dict[str, int] = {}
    for name, size in sizes.items():
        split |= {names[0]: size // inner, names[1]: inner} if name == axis else {name: size}
    return split


def _ranks_along(sizes: Mapping[str, int], rank: int, *axes: str) -> tuple[int, ...]:
    """The ranks that differ from `rank` along these axes alone, and it itself, in ascending order."""
    ranks = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    place = np.unravel_index(rank, ranks.shape)
    index = tuple(slice(None) if axis in axes else where for axis, where in zip(sizes, place, strict=True))
    return tuple(ranks[index].flatten().tolist())
