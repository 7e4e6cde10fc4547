"""The norm of the full gradient of an exact run: squares added up by a tree that no mesh changes.

FSDP shards a gradient by rows (dim 0), unevenly where the ranks do not divide them. So a row is the smallest term: each
rank adds up the squares of its rows, all rows' sums are gathered, and every rank adds those up in the same order. A
row's sum is made of element-wise additions of halves, because a kernel that sums may take another order for another
number of rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mmm.parallel.exact.lanes import all_gather
from mmm.parallel.exact.trees import sum_near
from mmm.parallel.local import to_group_device, to_local

# The names of the parameters that the ranks of a group shard.
NamesByGroup = defaultdict[dist.ProcessGroup, list[str]]


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


def row_squares(gradient: Tensor, lanes: int = 1) -> Tensor:
    """Return the sum of squares of each row of a tensor, float32 at least. A tensor of one dim has rows of one element.

    Args:
        gradient: (rows, …), with or without rows.
        lanes: number of equal pieces of each row, which have a sum each.

    Returns:
        (rows, lanes).
    """
    rows, *others = gradient.shape
    # A rank of FSDP may have no rows, so the size of a row comes from the other dims.
    columns_per_lane = math.prod(others) // lanes
    wide_dtype = torch.promote_types(gradient.dtype, torch.float32)
    squares = gradient.to(wide_dtype).square()
    by_lane = squares.reshape(rows, lanes, columns_per_lane)
    return sum_of_last_dim(by_lane)


@torch.no_grad()
def exact_norm(
    gradients: Mapping[str, Tensor],
    names: Sequence[str],
    device: torch.device,
    stages: DeviceMesh | None = None,
    lanes: Mapping[str, int] | None = None,
) -> Tensor:
    """Return the 2-norm of the full gradient, the same to the last bit on every mesh. A collective of all ranks.

    Args:
        gradients: gradients by the name of their parameter; `DTensor`s if they are sharded.
        names: the names of all parameters of the full model, in its order.
        device: where the norm is computed.
        stages: the pp axis, whose ranks have other layers.
        lanes: number of lanes along tp by the name of each parameter whose dim 1 they shard.

    Returns:
        A scalar, float32 at least, the same on every rank.
    """
    lanes = lanes or {}
    # For each parameter: (rows of this rank, lanes of this rank).
    lane_rows = {}

    # Number of rows of a parameter that the ranks of dp share: all, or what tensor parallel leaves of them.
    dp_rows = {}
    # Which parameters are sharded: dim 1 over tp; dim 0 over dp; dim 0 over tp.
    columns_by_group: NamesByGroup = defaultdict(list)
    rows_by_group: NamesByGroup = defaultdict(list)
    tp_rows_by_group: NamesByGroup = defaultdict(list)
    for name, gradient in gradients.items():
        own_lanes = lanes.get(name, 1)
        dp_rows[name] = gradient.shape[0]
        for axis, dim, group in _sharding_groups(gradient):
            if axis == "tp" and dim == 1:
                own_lanes //= group.size()
                columns_by_group[group].append(name)
            elif axis == "tp":
                dp_rows[name] //= group.size()
                tp_rows_by_group[group].append(name)
            else:
                assert dim == 0, f"FSDP shards dim 0, and the gradient of {name} is sharded along {dim}"
                rows_by_group[group].append(name)
        own_gradient = to_local(gradient)
        lane_rows[name] = row_squares(own_gradient, own_lanes)

    for group, members in columns_by_group.items():
        own = {name: lane_rows[name] for name in members}
        lane_rows |= _lanes_of_all_ranks(own, group)

    # (rows of this rank,) by name: now the lanes of a row are added up.
    rows = {}
    for name, values in lane_rows.items():
        rows[name] = sum_near(values.unbind(1))

    # Tensor parallel shards first, and FSDP what that leaves: rows are put together in the opposite order.
    for group, members in rows_by_group.items():
        own = {name: rows[name] for name in members}
        rows |= _rows_of_all_ranks(own, dp_rows, group)
    for group, members in tp_rows_by_group.items():
        own = {name: rows[name] for name in members}
        full_rows = {name: gradients[name].shape[0] for name in members}
        rows |= _rows_of_all_ranks(own, full_rows, group)

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


def _sharding_groups(gradient: Tensor) -> Iterator[tuple[str, int, dist.ProcessGroup]]:
    """Yield (axis, dim, ranks) for each sharding of a gradient. Yield nothing if this rank has all of it."""
    if not isinstance(gradient, DTensor):
        return
    mesh = gradient.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    for axis, placement in enumerate(gradient.placements):
        # What is replicated has no dim.
        dim = getattr(placement, "dim", None)
        is_shared = mesh.size(axis) > 1
        if is_shared and dim is not None:
            group = mesh.get_group(axis)
            yield names[axis], dim, group


def _lanes_of_all_ranks(
    lane_rows: Mapping[str, Tensor],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Gather `row_squares` of the lanes of all ranks, from those of this rank's lanes. A collective of the ranks of tp.

    Returns:
        (rows, lanes) by name.
    """
    # One collective for all parameters: their sums stand one after the other.
    flat = []
    sizes = []
    for values in lane_rows.values():
        flat.append(values.flatten())
        sizes.append(values.numel())
    own = to_group_device(torch.cat(flat), group)
    by_rank = all_gather(own, group)
    # For each parameter: (ranks, rows · lanes of a rank).
    by_parameter = torch.stack(by_rank).split(sizes, 1)
    full = {}
    for (name, values), shards in zip(lane_rows.items(), by_parameter, strict=True):
        # (ranks, rows, lanes of a rank) → (rows, ranks, lanes of a rank) → (rows, lanes)
        by_row = shards.unflatten(1, values.shape)
        by_row = by_row.movedim(0, 1)
        full[name] = by_row.flatten(1)
    return full


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
