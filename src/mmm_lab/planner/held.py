"""Which part of each tensor a rank holds, read off the tensors of its dry run: placements, not formulas.

`DTensor` says over which axes of its mesh each dim is sharded, so the tensors of one rank say what every rank of the
same pipeline stage holds (`HeldTensor.box`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmm.layout import AXES, Layout, Techniques
from mmm.nn.draw import ShardBox, canonical_name
from mmm.parallel.local import shard_box, shards_of, to_local
from mmm.parallel.pp.schedules import stages_of

NAMES = (*AXES, "dp_shard_cp", "ep", "expert_dp")  # of axes, that `coordinate_on` knows


class Sharding(NamedTuple):
    """Of a dim, over the ranks of an axis."""

    dim: int
    axis: str
    ranks: int


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of a model, and how its ranks share it.

    Attributes:
        name: of a parameter; empty where nobody knows. shape: of the full tensor.
        shardings: one after the other, as `shard_box` applies them; empty for a replica on every rank.
        local: shape of this rank's part. gradient: elements of its gradient that this rank has in memory.
    """

    name: str
    shape: tuple[int, ...]
    shardings: tuple[Sharding, ...]
    local: tuple[int, ...]
    gradient: int = 0

    def box(self, layout: Layout, rank: int) -> ShardBox:
        """The part of it that a rank of the same pipeline stage has."""
        shards = [(s.dim, s.ranks, coordinate_on(s.axis, layout, rank)) for s in self.shardings]
        return shard_box(self.shape, shards)


def coordinate_on(axis: str, layout: Layout, rank: int) -> int:
    """The place of a rank on an axis of a mesh; 0 on one that is none of `layout`."""
    place = layout.coordinates(rank)
    if axis == "dp_shard_cp":
        return place["dp_shard"] * layout.cp + place["cp"]
    group, expert = divmod(place["dp_shard"], layout.ep)
    if axis == "expert_dp":
        return (group * layout.cp + place["cp"]) * layout.tp + place["tp"]
    return expert if axis == "ep" else place.get(axis, 0)


class HeldTensors:
    """What the run of one rank has: parameters as they lie on it, and what its optimizer updates.

    Args:
        layout: of the run. resolved: its `Job`.

    Attributes:
        techniques: on the layout.
        sample: shape of what a step's forward takes of one data-parallel coordinate; empty where nobody says.
        modules: of a pipeline, all of them, in the order of forward; stages: those on each coordinate of pp. Both are
            empty without. stages_per_rank: of it; else 1.
        microbatches: of a step.
        parameters: in the model's order. updated: by the optimizer, once it has made a step.
    """

    def __init__(self, layout: Layout, resolved: Any) -> None:
        self.layout = layout
        self.techniques: Techniques = getattr(resolved, "techniques", Techniques())
        self.sample: tuple[int, ...] = tuple(getattr(getattr(resolved, "sample", None), "shape", ()))
        self.parameters, self.updated = list[HeldTensor](), list[HeldTensor]()
        partition = getattr(resolved, "partition", None)
        self.microbatches: int = 1 if partition is None else partition.microbatches
        self.modules: tuple[str, ...] = ()
        self.stages: tuple[tuple[str, ...], ...] = ()
        self.stages_per_rank = 1
        if partition is not None and partition.stages:
            names, pp, schedule = partition.names(), layout.pp, self.techniques.schedule
            self.modules = tuple(name for stage in names for name in stage)
            self.stages_per_rank = len(names) // pp
            numbers = [stages_of(coordinate, pp, schedule, self.stages_per_rank) for coordinate in range(pp)]
            self.stages = tuple(tuple(name for stage in own for name in names[stage]) for own in numbers)

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note the parameters among tensors, once they have their memory."""
        self.parameters += [
            held_tensor(canonical_name(name), tensor, self.layout)
            for name, tensor in named
            if isinstance(tensor, nn.Parameter)
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the first step of an optimizer is noted."""

        def before(optimizer: Optimizer, *_: Any) -> None:
            if not self.updated:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                self.updated += [held_tensor("", parameter, self.layout) for parameter in parameters]

        hook = register_optimizer_step_pre_hook(before)
        try:
            yield
        finally:
            hook.remove()


def held_tensor(name: str, tensor: Tensor, layout: Layout) -> HeldTensor:
    """A tensor as it lies on this rank."""
    shardings: tuple[Sharding, ...] = ()
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
        ranks = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis, _ in shards_of(tensor)}
        axes = {axis: axis_of(names[axis], ranks[axis], layout) for axis in ranks}
        shardings = tuple(Sharding(dim, axes[axis], mesh.size(axis)) for axis, dim in shards_of(tensor))
    gradient = 0 if tensor.grad is None else _elements_in_memory(tensor.grad)
    local = tuple(to_local(tensor.detach()).shape)
    return HeldTensor(name, tuple(tensor.shape), shardings, local, gradient)


def axis_of(name: str, ranks: Sequence[int], layout: Layout) -> str:
    """The layout's name of a mesh's axis, which a program may call as it likes: by the ranks of a group on it."""
    if name in NAMES:
        return name
    places = [layout.coordinates(rank) for rank in ranks]
    differ = tuple(axis for axis in AXES if len({place[axis] for place in places}) > 1)
    if differ == ("dp_shard", "cp"):
        return "dp_shard_cp"
    return differ[0] if len(differ) == 1 else name


def _elements_in_memory(gradient: Tensor) -> int:
    """Also those of which this rank updates nothing: ZeRO-1's gradients are parts of full ones. Not more than the
    tensor has: DDP's are parts of a bucket."""
    local = to_local(gradient)
    stored = local.untyped_storage().nbytes() // local.element_size()
    return min(stored, math.prod(gradient.shape))
