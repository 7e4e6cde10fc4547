"""The norm of the full gradient of an exact run: squares added up by a tree that no mesh changes.

FSDP shards a gradient by rows (dim 0), unevenly where the ranks do not divide them. So a row is the smallest term: each
rank adds up the squares of its rows, all rows' sums are gathered, and every rank adds those up in the same order. A
row's sum is made of element-wise additions of halves, because a kernel that sums may take another order for another
number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mmm.parallel.exact.lanes import all_gather
from mmm.parallel.local import to_group_device, to_local


def sum_of_last_dim(values: Tensor) -> Tensor:
    """Add up the last dim by a far tree of element-wise sums, padded with zeros to a power of two.

    Args:
        values: (…, n), n at least 1.

    Returns:
        (…,).
    """
    length = values.shape[-1]
    # The next power of two.
    padded = 1 << (length - 1).bit_length()
    values = functional.pad(values, (0, padded - length))
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first + second
    return values[..., 0]


def row_squares(gradient: Tensor) -> Tensor:
    """The sum of squares of each row of a tensor, float32 at least. A tensor of one dim has rows of one element.

    Args:
        gradient: (rows, …), with or without rows.

    Returns:
        (rows,).
    """
    rows, *others = gradient.shape
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    squares = wide.square().reshape(rows, math.prod(others))
    return sum_of_last_dim(squares)


@torch.no_grad()
def exact_norm(
    gradients: Mapping[str, Tensor],
    names: Sequence[str],
    stages: DeviceMesh | None = None,
) -> Tensor:
    """The 2-norm of the full gradient, the same to the last bit on every mesh. A collective of all ranks.

    Args:
        gradients: gradients by the name of their parameter, at least one; `DTensor`s if they are sharded.
        names: the names of all parameters of the full model, in its order.
        stages: the pp axis, whose ranks have other layers.

    Returns:
        A scalar, float32 at least, the same on every rank.
    """
    rows = {}
    by_group: dict[dist.ProcessGroup, list[str]] = {}
    for name, gradient in gradients.items():
        rows[name] = row_squares(to_local(gradient))
        group = _sharding_group(gradient)
        if group is not None:
            by_group.setdefault(group, []).append(name)
    for group, members in by_group.items():
        rows |= _rows_of_all_ranks({name: rows[name] for name in members}, gradients, group)
    # A parameter without a gradient counts as 0, so that the tree has the same leaves on every mesh.
    squares = dict.fromkeys(names, torch.zeros(()))
    for name, values in rows.items():
        squares[name] = sum_of_last_dim(values)
    device = next(iter(rows.values())).device
    by_name = torch.stack([square.to(device) for square in squares.values()])
    if stages is not None:
        # Each parameter is in one stage, and the others add its 0.
        group = stages.get_group()
        by_name = torch.stack(all_gather(to_group_device(by_name, group), group)).sum(0)
    return sum_of_last_dim(by_name).sqrt()


def _sharding_group(gradient: Tensor) -> dist.ProcessGroup | None:
    """The ranks that FSDP shards a gradient over. None if this rank has all of it."""
    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            assert placement.is_shard(0), f"FSDP shards dim 0, and this gradient is {placement}"
            return mesh.get_group(axis)
    return None


def _rows_of_all_ranks(
    rows: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """`row_squares` of full gradients, from those of this rank's shards. A collective of the ranks of a group.

    Returns:
        (rows of the full gradient,) by name.
    """
    # Rows of a shard, as ``torch.chunk`` splits: the last ranks may have fewer, or none.
    most = {name: -(-gradients[name].shape[0] // group.size()) for name in rows}
    padded = [functional.pad(values, (0, most[name] - len(values))) for name, values in rows.items()]
    # One collective for all parameters.
    by_rank = all_gather(to_group_device(torch.cat(padded), group), group)
    # (ranks, rows of a shard) each
    shards = torch.stack(by_rank).split(list(most.values()), 1)
    full = {}
    for name, values in zip(rows, shards, strict=True):
        full[name] = values.flatten()[: gradients[name].shape[0]]
    return full
