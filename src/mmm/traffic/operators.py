"""Reads what an operator on a process group sends from its arguments, and names the axes of groups by their ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mmm.layout import CP_AXES, Layout
from mmm.parallel.collective_bytes import Call
from mmm.torch_private.operators import schema_name, tensors_in


def operator_name(func: Any) -> str:
    """Return an operator's short name: ``allreduce`` for ``c10d::allreduce_``, ``all_reduce`` if it is functional."""
    name = schema_name(func).split("::")[1]
    return name.strip("_").removesuffix("_out")


def _bytes(nested: Any) -> int:
    n_bytes = 0
    for tensor in tensors_in(nested):
        n_bytes += tensor.numel() * tensor.element_size()
    return n_bytes


# A reader is a function of an operator's arguments, the size of its group and this rank's number in the group. It
# returns the calls to count. There is one for each operation. It serves both namespaces, c10d and _c10d_functional,
# which differ in the names of arguments, and in who makes the output.
Arguments = Mapping[str, Any]
Reader = Callable[[Arguments, int, int], list[Call]]


def _reader(operation: str, *names: str, by_shards: bool = False) -> Reader:
    """Make the reader of an operation.

    Args:
        operation: name of the operation in `collective_bytes`.
        names: names of arguments; the first that the operator has is the buffer.
        by_shards: whether the buffer is a rank's shard of the full buffer, not the full one.
    """

    def read(arguments: Arguments, size: int, rank: int) -> list[Call]:
        buffers = [arguments[name] for name in names if name in arguments]
        payload = _bytes(buffers[0])
        root = arguments.get("root_rank", arguments.get("src", 0))
        if by_shards:
            payload *= size
        return [Call(operation, size, rank, payload, root=root)]

    return read


def _gather_lists(arguments: Arguments, size: int, rank: int) -> list[Call]:
    local = arguments["input_tensors"] if "input_tensors" in arguments else arguments["input_list"]
    payload = _bytes(local) * size
    return [Call("all_gather", size, rank, payload)]


def _all_to_all_single(arguments: Arguments, size: int, rank: int) -> list[Call]:
    # (rows, …): each rank gets some of the rows.
    buffer = arguments["input"]
    payload = _bytes(buffer)
    splits = arguments.get("input_split_sizes") or arguments.get("in_splits")
    # Elements that the rank sends to itself, which do not leave it.
    own: float
    if splits:
        own = splits[rank] * math.prod(buffer.shape[1:])
    else:
        own = buffer.numel() / size
    leaving = round(payload - own * buffer.element_size())
    return [Call("all_to_all", size, rank, payload, leaving=leaving)]


def _all_to_all(arguments: Arguments, size: int, rank: int) -> list[Call]:
    # One tensor for each rank.
    tensors = arguments["input_tensors"]
    payload = _bytes(tensors)
    own = _bytes(tensors[rank])
    return [Call("all_to_all", size, rank, payload, leaving=payload - own)]


def _gather(arguments: Arguments, size: int, rank: int) -> list[Call]:
    local = _bytes(arguments["input_tensors"])
    root = arguments["root_rank"]
    leaving = 0 if rank == root else local
    return [Call("gather", size, rank, local * size, root=root, leaving=leaving)]


def _scatter(arguments: Arguments, size: int, rank: int) -> list[Call]:
    local = _bytes(arguments["output_tensors"])
    root = arguments["root_rank"]
    leaving = local * (size - 1) if rank == root else 0
    return [Call("scatter", size, rank, local * size, root=root, leaving=leaving)]


def _p2p_bytes(arguments: Arguments) -> int:
    buffer = arguments["tensors"] if "tensors" in arguments else arguments["tensor"]
    return _bytes(buffer)


def _send(arguments: Arguments, size: int, rank: int) -> list[Call]:
    payload = _p2p_bytes(arguments)
    receiver = arguments.get("dst", 0)
    return [Call("send", size, rank, payload, root=receiver, leaving=payload)]


def _receive(arguments: Arguments, size: int, rank: int) -> list[Call]:
    return [Call("receive", size, rank, _p2p_bytes(arguments))]


def _batch_p2p(arguments: Arguments, size: int, rank: int) -> list[Call]:
    calls = []
    for operation, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
        read = _send if operation == "isend" else _receive
        calls += read({"tensor": tensor}, size, rank)
    return calls


def _barrier(arguments: Arguments, size: int, rank: int) -> list[Call]:
    return [Call("barrier", size, rank, 0)]


# Name of an operator → its reader.
READERS: dict[str, Reader] = {
    # Operators of torch.distributed's functions, in the namespace c10d.
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
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    # Operators of functional collectives, in the namespace _c10d_functional.
    "all_reduce": _reader("all_reduce", "input"),
    "all_reduce_coalesced": _reader("all_reduce", "inputs"),
    "all_gather_into_tensor": _reader("all_gather", "input", by_shards=True),
    "all_gather_into_tensor_coalesced": _reader("all_gather", "inputs", by_shards=True),
    "reduce_scatter_tensor": _reader("reduce_scatter", "input"),
    "all_to_all_single": _all_to_all_single,
    "isend": _send,
    "irecv": _receive,
    "batch_p2p_ops": _batch_p2p,
}


def axes_of(
    layout: Layout,
    rank: int,
    experts: bool = False,
    ulysses: int = 1,
) -> dict[tuple[int, ...], str]:
    """Name the groups that a rank is in on a mesh of `layout`: ranks of the group → axis. Needs no process group.

    Args:
        layout: the layout of the mesh.
        rank: the rank whose groups are named.
        experts: whether the mesh has axes for experts, as in `build_mesh`.
        ulysses: ranks of cp that shard heads, as in `Mesh.split_cp`.
    """
    # Outermost first. Of dp_shard, `ep` is the inner part and `shards` the outer one.
    ring, heads = CP_AXES
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "shards": layout.dp_shard // layout.ep,
        "ep": layout.ep,
        ring: layout.cp // ulysses,
        heads: ulysses,
        "tp": layout.tp,
    }
    # A grid of all ranks, with one dim for each axis.
    ranks = np.arange(layout.ranks).reshape(list(sizes.values()))
    place = dict(zip(sizes, np.unravel_index(rank, ranks.shape), strict=True))
    # Each axis with those that it is made of. Of groups with the same ranks the first gives the name.
    made_of = {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "dp_shard": ("shards", "ep"),
        "cp": CP_AXES,
        "tp": ("tp",),
        "dp_shard_cp": ("shards", "ep", *CP_AXES),
        ring: (ring,),
        heads: (heads,),
    }
    if layout.ep > 1 or (experts and layout.tp > 1):
        made_of |= {"expert_dp": ("shards", *CP_AXES, "tp"), "ep": ("ep",)}
    axes: dict[tuple[int, ...], str] = {}
    for axis, parts in made_of.items():
        index = tuple(slice(None) if name in parts else place[name] for name in sizes)
        members = tuple(ranks[index].flatten().tolist())
        if len(members) > 1 or axis in ("dp_shard", "ep"):
            axes.setdefault(members, axis)
    return axes
