"""Which shard of each tensor a rank holds. It is read from the tensors of its dry run, not computed by formulas.

`DTensor` knows over which axes of its mesh each dim is sharded. So the tensors of one rank say what every rank of the
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
from mmm.nn.init import ShardBox, canonical_name
from mmm.parallel.local import shard_box, shards_of, to_local
from mmm.parallel.pp.schedules import stages_of
from mmm.traffic.operators import axes_of

# Names of axes that `coordinate_on` knows.
NAMES = (*AXES, "dp_shard_cp", "ep", "expert_dp")


class Sharding(NamedTuple):
    """A dim of a tensor is sharded over the ranks of an axis."""

    dim: int
    axis: str
    ranks: int


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of a model, and how the ranks share it.

    Attributes:
        name: name of the parameter; empty if it is not known.
        shape: shape of the full tensor.
        shardings: applied one after another, as `shard_box` does; empty if each rank has a replica.
        local: shape of this rank's shard.
        gradient: number of elements of its gradient that this rank has in memory.
    """

    name: str
    shape: tuple[int, ...]
    shardings: tuple[Sharding, ...]
    local: tuple[int, ...]
    gradient: int = 0

    def box(self, layout: Layout, rank: int) -> ShardBox:
        """The shard that a rank of the same pipeline stage has."""
        shards = [(s.dim, s.ranks, coordinate_on(s.axis, layout, rank)) for s in self.shardings]
        return shard_box(self.shape, shards)


def coordinate_on(axis: str, layout: Layout, rank: int) -> int:
    """The coordinate of a rank on an axis; 0 on an axis that `layout` does not have."""
    place = layout.coordinates(rank)
    if axis == "dp_shard_cp":
        return place["dp_shard"] * layout.cp + place["cp"]
    # ep takes its ranks from dp_shard: neighbours there have different experts.
    group, expert = divmod(place["dp_shard"], layout.ep)
    if axis == "expert_dp":
        return (group * layout.cp + place["cp"]) * layout.tp + place["tp"]
    return expert if axis == "ep" else place.get(axis, 0)


class HeldTensors:
    """What one rank of a run has: its shards of the parameters, and the tensors that its optimizer updates.

    Args:
        job: the run's `Job`, or the one of a script, which may lack any of its fields.
        device: type of the run's device.
        precision: name of its precision.

    Attributes:
        notes: lines on what was chosen where no flag says it.
        techniques: techniques of the run.
        sample: shape of the samples of a step for one data-parallel coordinate; empty if it is not known.
        microbatches: number of micro-batches in a step.
        modules: names of all modules of a pipeline, in the order of forward; empty without a pipeline.
        stages: names of the modules on each coordinate of pp; empty without a pipeline.
        stage_sizes: elements of the parameters on each coordinate of pp; empty without a pipeline.
        stages_per_rank: number of pipeline stages on each rank; 1 without a pipeline.
        parameters: the parameters, in the model's order.
        updated: what the optimizer updates, once it has made a step.
    """

    def __init__(self, layout: Layout, job: Any, device: str, precision: str) -> None:
        self.layout = layout
        self.device = device
        self.precision = precision
        self.notes: tuple[str, ...] = getattr(job, "notes", ())
        self.techniques: Techniques = getattr(job, "techniques", Techniques())
        self.sample: tuple[int, ...] = tuple(getattr(getattr(job, "sample", None), "shape", ()))
        self.parameters: list[HeldTensor] = []
        self.updated: list[HeldTensor] = []
        self.microbatches = 1
        self.modules: tuple[str, ...] = ()
        self.stages: tuple[tuple[str, ...], ...] = ()
        self.stage_sizes: tuple[int, ...] = ()
        self.stages_per_rank = 1
        partition = getattr(job, "partition", None)
        if partition is None:
            return
        self.microbatches = partition.microbatches
        if not partition.stages:
            return
        self.stage_sizes = partition.parameters(job.model, layout.pp, self.techniques.schedule)
        # Names of the modules of each stage, in the order of forward.
        names = partition.names()
        self.modules = tuple(module for stage in names for module in stage)
        self.stages_per_rank = len(names) // layout.pp
        for coordinate in range(layout.pp):
            # Some schedules give a rank stages that are far apart in the model.
            stages = stages_of(
                coordinate,
                layout.pp,
                self.techniques.schedule,
                self.stages_per_rank,
            )
            self.stages += (tuple(module for stage in stages for module in names[stage]),)

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note the parameters among some tensors, when they have memory."""
        for name, tensor in named:
            if isinstance(tensor, nn.Parameter):
                self.parameters.append(held_tensor(canonical_name(name), tensor, self.layout))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what an optimizer updates in its first step inside the block."""

        def before(optimizer: Optimizer, *_: Any) -> None:
            if not self.updated:
                for group in optimizer.param_groups:
                    self.updated += [held_tensor("", parameter, self.layout) for parameter in group["params"]]

        hook = register_optimizer_step_pre_hook(before)
        try:
            yield
        finally:
            hook.remove()


def held_tensor(name: str, tensor: Tensor, layout: Layout) -> HeldTensor:
    """A tensor as this rank has it."""
    shardings: list[Sharding] = []
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or [f"axis {mesh_dim}" for mesh_dim in range(mesh.ndim)]
        for mesh_dim, dim in shards_of(tensor):
            # The group on this axis that this rank is in.
            ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
            shardings.append(Sharding(dim, axis_of(names[mesh_dim], ranks, layout), mesh.size(mesh_dim)))
    gradient = 0
    if tensor.grad is not None:
        gradient = _elements_in_memory(tensor.grad)
    local = tuple(to_local(tensor.detach()).shape)
    return HeldTensor(
        name=name,
        shape=tuple(tensor.shape),
        shardings=tuple(shardings),
        local=local,
        gradient=gradient,
    )


def axis_of(name: str, ranks: Sequence[int], layout: Layout) -> str:
    """The layout's name for an axis of a mesh. A program may name its axes as it likes, so the ranks decide.

    Args:
        name: the program's name for it.
        ranks: ranks of one of its groups.
    """
    if name in NAMES:
        return name
    return axes_of(layout, ranks[0]).get(tuple(ranks), name)


def _elements_in_memory(gradient: Tensor) -> int:
    """Number of elements of a gradient in memory, also of those whose parameters this rank does not update.

    The gradients of ZeRO-1 are views of full ones. Those of DDP are views of a bucket, which is larger than the tensor.
    """
    local = to_local(gradient)
    # The storage may be larger than the view of it that a gradient is.
    stored = local.untyped_storage().nbytes() // local.element_size()
    return min(stored, math.prod(gradient.shape))
