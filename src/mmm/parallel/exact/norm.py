"""The norm of the full gradient of an exact run: squares added up by a tree that no mesh changes.

FSDP shards a gradient by rows (dim 0), unevenly where the ranks do not divide them. So a row is the smallest term: each
rank adds up the squares of its rows, all rows' sums are gathered, and every rank adds those up in the same order. A
row's sum is made of element-wise additions of halves, because a kernel that sums may take another order for another
number of rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mmm.parallel.exact.collectives import all_gather
from mmm.parallel.local import to_group_device, to_local


def sum_of_last_dim(values: Tensor) -> Tensor:
    """Add up the last dim by a far tree of element-wise sums, padded with zeros to a power of two.

    Args:
        values: (…, n), n at least 1.

    Returns:
        (…,).
    """
    length = values.shape[-1]
    # The next power of two. Its zeros change no sum of squares, not even the last bit.
    padded_length = 1 << (length - 1).bit_length()
    missing = padded_length - length
    values = functional.pad(values, (0, missing))
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first + second
    return values[..., 0]


def row_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares of each row of a tensor, float32 at least. A tensor of one dim has rows of one element.

    Args:
        gradient: (rows, …), with or without rows.

    Returns:
        (rows,).
    """
    rows, *others = gradient.shape
    wide_dtype = torch.promote_types(gradient.dtype, torch.float32)
    squares = gradient.to(wide_dtype).square()
    # A rank of FSDP may have no rows, so the size of a row comes from the other dims.
    by_row = squares.reshape(rows, math.prod(others))
    return sum_of_last_dim(by_row)


@torch.no_grad()
def exact_norm(
    gradients: Mapping[str, Tensor],
    names: Sequence[str],
    device: torch.device,
    stages: DeviceMesh | None = None,
) -> Tensor:
    """Return the 2-norm of the full gradient, the same to the last bit on every mesh. A collective of all ranks.

    Args:
        gradients: gradients by the name of their parameter; `DTensor`s if they are sharded.
        names: the names of all parameters of the full model, in its order.
        device: where the norm is computed.
        stages: the pp axis, whose ranks have other layers.

    Returns:
        A scalar, float32 at least, the same on every rank.
    """
    # By name: (rows of this rank,), and then (rows of the full gradient,).
    rows = {}
    names_by_group: defaultdict[dist.ProcessGroup, list[str]] = defaultdict(list)
    for name, gradient in gradients.items():
        rows[name] = row_squares(to_local(gradient))
        group = _sharding_group(gradient)
        if group is not None:
            names_by_group[group].append(name)
    for group, members in names_by_group.items():
        own = {name: rows[name] for name in members}
        counts = {name: gradients[name].shape[0] for name in members}
        rows |= _rows_of_all_ranks(own, counts, group)

    # A parameter without a gradient counts as 0, so that the tree has the same leaves on every mesh.
    zero = torch.zeros(())
    squares = dict.fromkeys(names, zero)
    for name, values in rows.items():
        squares[name] = sum_of_last_dim(values)
    # (parameters of the full model,)
    on_device = [square.to(device) for square in squares.values()]
    by_name = torch.stack(on_device)
    if stages is not None:
        group = stages.get_group()
        own_stage = to_group_device(by_name, group)
        by_stage = all_gather(own_stage, group)
        # Each parameter is in one stage, and the others add its 0: this sum rounds nothing, in any order.
        by_name = torch.stack(by_stage).sum(0)
    total = sum_of_last_dim(by_name)
    return total.sqrt()


def _sharding_group(gradient: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share the rows of a gradient. None: this rank has all of them."""
    if not isinstance(gradient, DTensor):
        return None
    mesh = gradient.device_mesh
    for axis, placement in enumerate(gradient.placements):
        # What is replicated has no dim.
        dim = getattr(placement, "dim", None)
        if dim is not None and mesh.size(axis) > 1:
            assert dim == 0, f"FSDP shards dim 0, and a gradient is sharded along {dim}"
            return mesh.get_group(axis)
    return None


def _rows_of_all_ranks(
    rows: Mapping[str, Tensor],
    counts: Mapping[str, int],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Gather `row_squares` of full gradients, from those of this rank's shards. A collective of the ranks of a group.

    Args:
        counts: number of rows that the ranks shard, by name.

    Returns:
        (rows of the full gradient,) by name.
    """
    shard_rows = {}
    padded = []
    for name, values in rows.items():
        # Rows of a shard, as ``torch.chunk`` splits: the last ranks may have fewer, or none.
        shard_rows[name] = -(-counts[name] // group.size())
        missing = shard_rows[name] - len(values)
        padded.append(functional.pad(values, (0, missing)))
    # One collective for all parameters.
    own = to_group_device(torch.cat(padded), group)
    by_rank = all_gather(own, group)
    # For each parameter: (ranks, rows of a shard).
    sizes = list(shard_rows.values())
    shards = torch.stack(by_rank).split(sizes, 1)
    full = {}
    for name, values in zip(rows, shards, strict=True):
        # The padding of the last ranks is at the end.
        full[name] = values.flatten()[: counts[name]]
    return full
