"""The device mesh: which ranks form a group along which axis.

The axes and their order are those of `mmm.layout`. A `Layout` is the sizes alone: it is checked, and says who stands
where, before any process group is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@dataclass(frozen=True)
class Mesh:
    """A layout on process groups: what `build_mesh` makes.

    Attributes:
        layout: fitted.
        device_mesh: PyTorch's, with the axes of more than one rank, and always ``dp_shard``: an axis costs a process
            group a rank.
        experts: the same ranks as (pp, dp_replicate, expert_dp, ep), again without axes of one rank but for expert_dp,
            which is what ep leaves of dp_shard, × cp × tp: the ranks with the same experts and other tokens. None where
            experts are sharded as all other parameters are.
        no_data_parallel: the model stays as it is. On MPS, where PyTorch makes no groups and FSDP does not run: it has
            one rank. And where FSDP would only copy: in a trainer on one rank
            (`mmm.parallel.dp.data_parallel.needs_no_fsdp`), and around a model without replicas or shards that is not
            trained.
        p2p: of a pipeline on an accelerator: a group for what one rank sends another, by their coordinates (sender,
            receiver) on pp; those of this rank (`mmm.parallel.pp.p2p` says why). Gloo needs none.
        limit: that a collective may take. None: PyTorch's.
    """

    layout: Layout
    device_mesh: DeviceMesh
    experts: DeviceMesh | None = None
    no_data_parallel: bool = False
    p2p: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    limit: timedelta | None = None
    _axes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, mesh: Mesh | DeviceMesh) -> Mesh:
        """`mesh`, or one around a `DeviceMesh` of ``init_device_mesh``.

        Raises:
            LayoutError: its axes have other names or another order, or none is dp_shard.
        """
        if isinstance(mesh, Mesh):
            return mesh
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if "dp_shard" not in sizes or [*sizes] != [axis for axis in AXES if axis in sizes]:
            raise LayoutError(
                f"a mesh with axes {', '.join(sizes) or 'without names'}: name them, in this order, {', '.join(AXES)}; "
                f"dp_shard is always one of them"
            )
        return cls(Layout(**sizes), mesh)

    def __getitem__(self, axis: str) -> DeviceMesh:
        """One axis; ``dp_shard_cp`` is dp_shard and cp as one: the ranks that FSDP shards parameters over."""
        if axis not in self._axes:  # PyTorch makes a new mesh each time, and each has a list of all ranks
            if axis == "dp_shard_cp":
                self._axes[axis] = flatten(self.device_mesh["dp_shard", "cp"], axis)
            else:
                self._axes[axis] = self.device_mesh[axis]
        return self._axes[axis]

    def split_cp(self, ulysses: int) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """The cp axis as rings of groups of `ulysses` neighbours, ``cp_ring`` and ``cp_ulysses``. A collective.

        Returns:
            The two; None for one of a single rank.
        """
        if ulysses == 1:
            return self["cp"], None
        if ulysses == self.layout.cp:
            return None, self["cp"]
        if CP_AXES[0] not in self._axes:
            with default_timeout(self.limit or usual_timeout("gloo")), bound_if_it_splits():
                split = unflatten(self["cp"], (self.layout.cp // ulysses, ulysses), CP_AXES)
            self._axes.update({axis: split[axis] for axis in CP_AXES})
        return self._axes[CP_AXES[0]], self._axes[CP_AXES[1]]

    def gather(self, axis: str, value: Any) -> list[Any]:
        """Every rank's `value` along an axis, by coordinate: the one way to send objects over a mesh. A collective."""
        values: list[Any] = [None] * self[axis].size()
        dist.all_gather_object(values, value, self[axis].get_group())
        return values

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process group of each axis that this rank is in; where names repeat, the experts' are left out."""
        meshes = [self.device_mesh]
        if self.layout.cp > 1:
            meshes.append(self["dp_shard_cp"])
        meshes += [self._axes[axis] for axis in CP_AXES if axis in self._axes]
        if self.experts is not None:
            meshes.append(self.experts)
        by_axis: dict[str, dist.ProcessGroup] = {}
        for mesh in meshes:
            for axis in mesh.mesh_dim_names or ():
                by_axis.setdefault(axis, mesh.get_group(axis))
        return by_axis

    def __str__(self) -> str:
        return str(self.device_mesh)


def build_mesh(layout: Layout, device_type: str, timeout: float | None = None, experts: bool = False) -> Mesh:
    """The mesh of a fitted layout. A collective.

    Args:
        timeout: seconds; set on every group, because groups of a mesh do not take over the default group's. None: that
            of the `process_group` around it.
        experts: whether the model has experts: under tp they need a mesh of their own also where ep is 1.
    """
    sizes = {axis: size for axis, size in layout.sizes.items() if size > 1 or axis == "dp_shard"}
    limit = usual_timeout("gloo") if timeout is None else timedelta(seconds=timeout)
    no_data_parallel = device_type == "mps"
    if no_data_parallel:
        device_type = "cpu"
    expert_mesh = None
    p2p: dict[tuple[int, int], dist.ProcessGroup] = {}
    with default_timeout(limit), bound_if_it_splits():
        device_mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
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
        for group in groups:  # an axis of all ranks is the default group, which has been there before
            set_timeout(limit, group)
    return mesh


@contextmanager
def meshes_made_once() -> Iterator[None]:
    """Inside, PyTorch makes the same mesh once. Each has a list of all ranks, 4 MB on 100,000, and FSDP makes two a
    parameter: the one axis of HSDP's that it shards over, and its mesh joined with that of tp."""
    originals = {name: vars(DeviceMesh)[name] for name in MESH_MAKERS}
    made: dict[tuple[Any, ...], tuple[DeviceMesh, Any]] = {}

    def once(make: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
        def find(*args: Any) -> DeviceMesh:
            parts = args[0] if isinstance(args[0], list) else args
            key = tuple(id(part) if isinstance(part, DeviceMesh) else part for part in parts)
            if key not in made:
                made[key] = make(*args), parts  # which keeps the ids theirs
            return made[key][0]

        return find

    try:
        for name, original in originals.items():
            find = once(getattr(DeviceMesh, name))
            setattr(DeviceMesh, name, staticmethod(find) if isinstance(original, staticmethod) else find)
        yield
    finally:
        for name, original in originals.items():
            setattr(DeviceMesh, name, original)


def _build_expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    pp, dp_replicate, dp_shard, cp, tp = layout.sizes.values()
    ranks = torch.arange(layout.ranks).view(pp, dp_replicate, dp_shard // layout.ep, layout.ep, cp, tp)
    ranks = ranks.movedim(3, -1).reshape(pp, dp_replicate, -1, layout.ep)
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "expert_dp": ranks.shape[2], "ep": layout.ep}
    names = tuple(axis for axis, size in sizes.items() if size > 1 or axis == "expert_dp")
    return DeviceMesh(device_type, ranks.reshape([sizes[axis] for axis in names]), mesh_dim_names=names)


def neighbour_rounds(pp: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours on a ring of `pp` ≥ 2 ranks, in rounds: in each, a rank is in one pair at most."""
    ring = [(pp_rank, (pp_rank + 1) % pp) for pp_rank in range(pp)][: 1 if pp == 2 else pp]
    last = [ring.pop()] if pp % 2 else []  # the last of an odd number shares a rank with the first
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def build_p2p_groups(layout: Layout) -> dict[tuple[int, int], dist.ProcessGroup]:
    """`Mesh.p2p` of a layout with pp, for any schedule: the last rank and the first are neighbours too. A collective.

    A rank that is in no pair of a round is in a group by itself: PyTorch names a group by how many a rank has, and its
    members have to agree.
    """
    lines = torch.arange(layout.ranks).view(layout.pp, -1).T.tolist()  # the ranks of each pipeline
    own = layout.coordinates(dist.get_rank())["pp"]
    splits = getattr(default_group(), "bound_device_id", None) is not None
    groups: dict[tuple[int, int], Any] = {}
    for pairs in neighbour_rounds(layout.pp):
        singles = [(pp_rank,) for pp_rank in range(layout.pp) if not any(pp_rank in pair for pair in pairs)]
        members = [[line[pp_rank] for pp_rank in coordinates] for line in lines for coordinates in (*pairs, *singles)]
        for back in (False, True):
            group = dist.split_group(split_ranks=members) if splits else dist.new_subgroups_by_enumeration(members)[0]
            groups |= {(b, a) if back else (a, b): group for a, b in pairs if own in (a, b)}
    return groups
