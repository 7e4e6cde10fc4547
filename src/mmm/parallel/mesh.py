"""The device mesh: which ranks form a group along which axis.

The axes and their order are those of `mmm.layout`. A `Layout` holds only the sizes: it is checked, and tells each
rank's coordinates, before any process group is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmm.errors import LayoutError
from mmm.layout import AXES, CP_AXES, Layout
from mmm.runtime.process_group import bound_if_it_splits
from mmm.torch_private.groups import (
    MESH_MAKERS,
    default_group,
    default_timeout,
    flatten,
    set_timeout,
    unflatten,
    usual_timeout,
)
from mmm.torch_private.replace import all_replaced

# A group for each direction between two ranks, by their pp coordinates (sender, receiver).
P2PGroups = Mapping[tuple[int, int], dist.ProcessGroup]


@dataclass(frozen=True)
class Mesh:
    """A layout together with its process groups: what `build_mesh` makes.

    Attributes:
        layout: the sizes of the axes, fitted to the number of ranks.
        device_mesh: PyTorch's mesh, with the axes of more than one rank, and always ``dp_shard``. Axes of one rank are
            left out because each axis costs every rank a process group.
        experts: a second mesh over the same ranks, for the parameters of experts: (pp, dp_replicate, expert_dp, ep),
            again without axes of one rank except expert_dp. expert_dp joins what ep leaves of dp_shard with cp and tp:
            its ranks have the same experts and different tokens. None where experts are sharded like all other
            parameters.
        no_data_parallel: whether the model stays as it is, without DDP or FSDP. So on MPS, where PyTorch makes no
            groups and FSDP does not run: it has one rank. And so where FSDP would only copy: in a trainer on one rank
            (`mmm.parallel.dp.data_parallel.needs_no_fsdp`), and around a model without replicas or shards that is not
            trained.
        p2p: process groups for a pipeline's messages on an accelerator, only those that this rank is in
            (`mmm.parallel.pp.p2p` says why). Gloo needs none.
        limit: how long a collective may take. None: PyTorch's default.
    """

    layout: Layout
    device_mesh: DeviceMesh
    experts: DeviceMesh | None = None
    no_data_parallel: bool = False
    p2p: P2PGroups = field(default_factory=dict)
    limit: timedelta | None = None
    _axes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, mesh: Mesh | DeviceMesh) -> Mesh:
        """Return `mesh`; wrap it first where it is a `DeviceMesh` from ``init_device_mesh``.

        Raises:
            LayoutError: its axes have other names or another order, or none is dp_shard.
        """
        if isinstance(mesh, Mesh):
            return mesh
        names = mesh.mesh_dim_names or ()
        sizes = dict(zip(names, mesh.shape, strict=False))
        in_order = [axis for axis in AXES if axis in sizes]
        if "dp_shard" not in sizes or list(sizes) != in_order:
            axes = ", ".join(sizes) or "without names"
            raise LayoutError(
                f"a mesh with axes {axes}: name them, in this order, {', '.join(AXES)}; dp_shard is always one of them"
            )
        return cls(Layout(**sizes), mesh)

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The mesh of one axis. ``dp_shard_cp`` is dp_shard and cp as one axis: the ranks that FSDP shards over."""
        # Each is made once: PyTorch makes a new mesh at every call, with a list of all ranks in it.
        if axis not in self._axes:
            if axis == "dp_shard_cp":
                both = self.device_mesh["dp_shard", "cp"]
                self._axes[axis] = flatten(both, axis)
            # PyTorch 2.8 cuts nothing out of a mesh that is cut out of another, not even all of it.
            elif self.device_mesh.mesh_dim_names == (axis,):
                self._axes[axis] = self.device_mesh
            else:
                self._axes[axis] = self.device_mesh[axis]
        return self._axes[axis]

    def split_cp(self, ulysses: int) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """Split the cp axis in two: rings (``cp_ring``) of groups of `ulysses` neighbours (``cp_ulysses``).

        A collective: all ranks of the mesh make the new groups together.

        Returns:
            (cp_ring, cp_ulysses); None in place of an axis that would have a single rank.
        """
        if ulysses == 1:
            return self["cp"], None
        if ulysses == self.layout.cp:
            return None, self["cp"]
        if CP_AXES[0] not in self._axes:
            sizes = (self.layout.cp // ulysses, ulysses)
            with default_timeout(self.limit or usual_timeout()), bound_if_it_splits():
                split = unflatten(self.device_mesh, "cp", sizes, CP_AXES)
            for axis in CP_AXES:
                self._axes[axis] = split[axis]
        return self._axes[CP_AXES[0]], self._axes[CP_AXES[1]]

    def gather(self, axis: str, value: Any) -> list[Any]:
        """Gather every rank's `value` along an axis, ordered by coordinate. A collective of the ranks of that axis.

        This is the one way in which Python objects travel over a mesh.
        """
        mesh = self[axis]
        values: list[Any] = [None] * mesh.size()
        dist.all_gather_object(values, value, mesh.get_group())
        return values

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process group of each axis that this rank is in. Where the experts' mesh repeats the name of an axis, its
        group is left out."""
        meshes = [self.device_mesh]
        if self.layout.cp > 1:
            meshes.append(self["dp_shard_cp"])
        # Only after `split_cp`.
        for axis in CP_AXES:
            if axis in self._axes:
                meshes.append(self._axes[axis])
        if self.experts is not None:
            meshes.append(self.experts)
        by_axis: dict[str, dist.ProcessGroup] = {}
        for mesh in meshes:
            for axis in mesh.mesh_dim_names or ():
                by_axis.setdefault(axis, mesh.get_group(axis))
        return by_axis

    def __str__(self) -> str:
        return str(self.device_mesh)


def build_mesh(
    layout: Layout,
    device_type: str,
    timeout: float | None = None,
    experts: bool = False,
) -> Mesh:
    """Make the mesh of a fitted layout. A collective of all ranks.

    Args:
        layout: sizes whose product is the world size (`Layout.fit`).
        device_type: such as ``cuda``, ``xpu`` or ``cpu``.
        timeout: limit of a collective in seconds. It is set on every group, because the groups of a mesh do not inherit
            that of the default group. None: the limit of the surrounding `process_group`.
        experts: whether the model has experts: under tp these need a mesh of their own even where ep is 1.
    """
    sizes = {}
    for axis, size in layout.sizes.items():
        if size > 1 or axis == "dp_shard":
            sizes[axis] = size
    if timeout is None:
        limit = usual_timeout()
    else:
        limit = timedelta(seconds=timeout)
    no_data_parallel = device_type == "mps"
    if no_data_parallel:
        device_type = "cpu"
    expert_mesh = None
    p2p: P2PGroups = {}
    # Every rank goes through the same calls below, in the same order: each makes groups of all ranks together.
    with default_timeout(limit), bound_if_it_splits():
        shape = tuple(sizes.values())
        device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(sizes))
        # Under tp each rank has other tokens for the experts: for them, and only for them, tp is a data-parallel axis.
        if layout.ep > 1 or (experts and layout.tp > 1):
            expert_mesh = _build_expert_mesh(layout, device_type)
        if layout.pp > 1 and device_type != "cpu":
            p2p = build_p2p_groups(layout)
        mesh = Mesh(layout, device_mesh, expert_mesh, no_data_parallel, p2p, limit)
        groups = [*mesh.groups().values(), *p2p.values()]
        if expert_mesh is not None:
            groups += expert_mesh.get_all_groups()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported for either nccl or gloo")
        # An axis of all ranks is the default group, which was made before, with a limit of its own.
        for group in groups:
            set_timeout(limit, group)
    return mesh


def meshes_made_once() -> AbstractContextManager[None]:
    """Inside, PyTorch makes equal meshes only once, and reuses them.

    FSDP makes two meshes for each parameter: the one axis of HSDP's that it shards over, and its mesh joined with that
    of tp. Each mesh holds a list of all ranks, which is 4 MB on 100,000 ranks.
    """
    # Meshes by their arguments, and the arguments themselves: as long as they live, no other object has their ids.
    cache: dict[Any, DeviceMesh] = {}
    arguments: list[Any] = []

    def once(make: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
        def cached(*args: Any) -> DeviceMesh:
            # `_concatenate` takes one list of meshes, `__getitem__` a mesh and names of axes.
            values = args[0] if isinstance(args[0], list) else args
            key: tuple[Any, ...] = ()
            for value in values:
                key = (*key, id(value) if isinstance(value, DeviceMesh) else value)
            if key not in cache:
                cache[key] = make(*args)
                arguments.append(values)
            return cache[key]

        return cached

    changes = []
    for name in MESH_MAKERS:
        cached: Any = once(getattr(DeviceMesh, name))
        if isinstance(vars(DeviceMesh)[name], staticmethod):
            cached = staticmethod(cached)
        changes.append(((DeviceMesh, name), cached))
    return all_replaced(changes)


def _build_expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """`Mesh.experts` of a layout. A collective of all ranks."""
    pp, dp_replicate, dp_shard, cp, tp = layout.sizes.values()
    ep = layout.ep
    # Consecutive dp_shard coordinates form an ep group: (pp, dp_replicate, dp_shard / ep, ep, cp, tp).
    ranks = torch.arange(layout.ranks)
    ranks = ranks.view(pp, dp_replicate, dp_shard // ep, ep, cp, tp)
    # (pp, dp_replicate, dp_shard / ep · cp · tp, ep): the third dim is expert_dp.
    ranks = ranks.movedim(3, -1).reshape(pp, dp_replicate, -1, ep)
    all_sizes = {
        "pp": pp,
        "dp_replicate": dp_replicate,
        "expert_dp": ranks.shape[2],
        "ep": ep,
    }
    sizes = {}
    for axis, size in all_sizes.items():
        if size > 1 or axis == "expert_dp":
            sizes[axis] = size
    shape = list(sizes.values())
    return DeviceMesh(device_type, ranks.reshape(shape), mesh_dim_names=tuple(sizes))


def neighbour_rounds(pp: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours on a ring of `pp` ≥ 2 ranks, in rounds. In each round, a rank is in one pair at most."""
    if pp == 2:
        return [[(0, 1)]]
    ring = []
    for pp_rank in range(pp):
        next_rank = (pp_rank + 1) % pp
        ring.append((pp_rank, next_rank))
    # The last pair of an odd ring shares a rank with the first pair, and so has a round of its own.
    last = [ring.pop()] if pp % 2 else []
    rounds = [ring[::2], ring[1::2], last]
    return [pairs for pairs in rounds if pairs]


def build_p2p_groups(layout: Layout) -> P2PGroups:
    """Make `Mesh.p2p` for a layout with pp. A collective of all ranks.

    The groups suit any schedule: the last rank and the first are neighbours too. A rank that is in no pair of a round
    makes a group of its own: PyTorch names a group after how many a rank has made, and its members have to agree on the
    name.
    """
    # (pipelines, pp): the global ranks of each pipeline, in the order of its stages.
    ranks = torch.arange(layout.ranks)
    pipelines = ranks.view(layout.pp, -1).T.tolist()
    own = layout.coordinates(dist.get_rank())["pp"]
    # A group that is bound to a device is split by the backend itself (NCCL), without a new rendezvous.
    splits = getattr(default_group(), "bound_device_id", None) is not None
    groups: dict[tuple[int, int], Any] = {}
    for pairs in neighbour_rounds(layout.pp):
        paired = {pp_rank for pair in pairs for pp_rank in pair}
        # Coordinates of the members of each group.
        round_groups: list[tuple[int, ...]] = list(pairs)
        for pp_rank in range(layout.pp):
            if pp_rank not in paired:
                round_groups.append((pp_rank,))
        members = []
        for pipeline in pipelines:
            for coordinates in round_groups:
                members.append([pipeline[pp_rank] for pp_rank in coordinates])
        # Two groups for each pair, one a direction: forward first, then back.
        for back in (False, True):
            if splits:
                group = dist.split_group(split_ranks=members)
            else:
                group, _ = dist.new_subgroups_by_enumeration(members)
            for first, second in pairs:
                if own in (first, second):
                    direction = (second, first) if back else (first, second)
                    groups[direction] = group
    return groups
