"""Layouts, the techniques on them, and how a batch lies on them: only sizes and names, without torch.

Axes of the mesh, outermost first::

    pp            pipeline stages
    dp_replicate  data parallel: replicas of the model
    dp_shard      data parallel: parameters sharded over it (FSDP)
    cp            the sequence sharded, or the rows of fields
    tp            matrices sharded; innermost, because it communicates most: neighbours, ideally on one host

ep, expert parallel, has no ranks of its own: it divides dp_shard. Its groups are neighbours on that axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.units import counted

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# The two axes that cp is split into if attention uses both styles.
CP_AXES = ("cp_ring", "cp_ulysses")
# zero3 is fsdp.
DATA_PARALLEL = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
SEQUENCE_STYLES = ("ring", "ulysses", "usp")
CP_STYLES = (*SEQUENCE_STYLES, "space")
# With these every rank keeps all parameters.
UNSHARDED = ("ddp", "zero1", "zero2")
# A target that cross-entropy passes over: PyTorch's default.
PADDING = -100
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True)
class Layout:
    """Size of each axis, in ranks. ``dp_shard=-1``: whatever the other axes leave.

    ``ep`` divides ``dp_shard`` and uses its ranks once more: it is not a factor of their number, and not in `sizes`.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        """Such as ``dp2·tp2``, or ``dp4·ep2``, which is 4 ranks; ``1`` for a single rank."""
        texts = []
        for axis, size in {**self.sizes, "ep": self.ep}.items():
            if size == 1:
                continue
            # One data-parallel axis is enough to say "dp".
            if axis == "dp_shard" and self.dp_replicate == 1:
                axis = "dp"
            texts.append(f"{axis}{size}")
        return "·".join(texts) or "1"

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def dp(self) -> int:
        """Number of data-parallel coordinates: the global batch is split into so many shards."""
        return self.dp_replicate * self.dp_shard

    def fit(self, world_size: int) -> Layout:
        """This layout with ``dp_shard`` computed for that many ranks.

        Raises:
            LayoutError: an axis is not a positive size, the axes do not multiply to `world_size`, or ep does not divide
                dp_shard.
        """
        if self.ep < 1:
            raise LayoutError(f"ep {self.ep}: it is at least 1, which is no expert parallelism")
        for axis, size in self.sizes.items():
            is_computed = axis == "dp_shard" and size == -1
            if size < 1 and not is_computed:
                raise LayoutError(f"{axis} {size}: an axis of the mesh has at least 1 rank")
        there_are = "is 1" if world_size == 1 else f"are {world_size}"
        if self.dp_shard == -1:
            fixed = {axis: size for axis, size in self.sizes.items() if axis != "dp_shard" and size > 1}
            product = math.prod(fixed.values())
            if world_size % product:
                named = " · ".join(f"{axis} {size}" for axis, size in fixed.items())
                # The number of ranks next to this one that the layout goes onto, and ep as well.
                unit = product * self.ep
                near = max(round(world_size / unit), 1) * unit
                raise LayoutError(
                    f"{named} needs a multiple of {counted(product, 'rank')}, and there {there_are}: "
                    f"start {counted(near, 'rank')}, or change the layout",
                    ranks=near,
                )
            return replace(self, dp_shard=world_size // product)._check_ep()
        if self.ranks != world_size:
            ranks = counted(self.ranks, "rank")
            raise LayoutError(
                f"the layout {self} has {ranks}, and there {there_are}: start {ranks}, or change the layout",
                ranks=self.ranks,
            )
        return self._check_ep()

    def _check_ep(self) -> Layout:
        """This layout. Raises LayoutError if ep does not divide dp_shard, which is known now."""
        if self.dp_shard % self.ep:
            raise LayoutError(
                f"ep {self.ep} does not divide dp_shard {self.dp_shard} (data-parallel ranks share the experts)"
            )
        return self

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis; tp varies fastest."""
        place = {}
        # From the innermost axis to the outermost: the remainder is the coordinate, and the rest goes on.
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def dp_coordinate(self, rank: int) -> int:
        """Which shard of the global batch a rank takes, 0 … dp - 1."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    @cached_property
    def loss_rank_slice(self) -> slice:
        """`loss_ranks` as a slice, for a table by rank."""
        # pp is the outermost axis, so the last stage has the last ranks; tp is the innermost.
        ranks_per_stage = self.ranks // self.pp
        first = ranks_per_stage * (self.pp - 1)
        return slice(first, None, self.tp)

    def loss_ranks(self) -> list[int]:
        """The ranks whose local losses add up to the global loss: one of each tp group, in the last pipeline stage."""
        return list(range(self.ranks)[self.loss_rank_slice])

    def has_loss(self, rank: int) -> bool:
        """Whether a rank is one of `loss_ranks`."""
        place = self.coordinates(rank)
        return place["pp"] == self.pp - 1 and place["tp"] == 0


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How a model is parallelized on a layout.

    Attributes:
        data_parallel: ``ddp``, ``zero1``, ``zero2``, ``fsdp`` (the same as ``zero3``) or ``hsdp``.
        reshard_after_forward: which FSDP units are freed after forward, and gathered again for backward. ``auto``: all
            but the last, in a pipeline none. ``always``: all. ``never``: none.
        cp_style: how attention works over a sequence that cp shards: ``ring``, ``ulysses`` or ``usp``. ``space``: cp
            splits the rows of fields instead.
        ulysses: for ``usp``, the number of neighbours along cp that shard the heads, a divisor of cp; a ring goes
            between these groups.
        schedule: order of forwards and backwards in a pipeline.
        microbatches: number of micro-batches in a step. None: with pp the fewest that the schedule takes, else 1. With
            pp all have the same size; without it they differ by one sample at most (gradient accumulation).
        stages_per_rank: number of pipeline stages on a rank. None: the fewest that the schedule takes.
        checkpointing: which activations of the modules that the plan names are recomputed in backward: ``none``,
            ``full`` or ``selective``.
        compile: compile what the plan says can be compiled.
        loss_chunks: number of chunks of the sequence that logits and loss are computed in. The loss is then the model's
            own `loss_of`.
        offload: keep what the optimizer updates, and its state, in the host's memory.
        exact: number of lanes that the samples of a global batch are split into, a power of two: the same bits on every
            number of dp ranks that divides it. None: sums are in whatever order is fastest.
    """

    data_parallel: str = "fsdp"
    reshard_after_forward: str = "auto"
    cp_style: str = "ring"
    ulysses: int | None = None
    schedule: ScheduleName = "1F1B"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    checkpointing: str = "none"
    compile: bool = False
    loss_chunks: int = 1
    offload: bool = False
    exact: int | None = None

    def ulysses_size(self, cp: int) -> int:
        """Number of cp ranks that share the heads of attention: 1 under ``ring``, all under ``ulysses``."""
        if self.cp_style == "ulysses":
            return cp
        if self.cp_style == "usp":
            return self.ulysses or 1
        return 1


def check_lanes(lanes: int) -> None:
    """Raises ConfigError for a number of lanes that no binary tree adds up."""
    # A power of two has a single bit.
    if lanes < 1 or lanes.bit_count() != 1:
        raise ConfigError(f"{config_field('exact')} {lanes}: it must be a power of two, because sums are a binary tree")


def check_data_parallel(data_parallel: str, layout: Layout) -> None:
    """Check that a data-parallel technique goes with the other axes of a layout. Needs no process group.

    Raises:
        ConfigError: there is no such technique.
        LayoutError: it does not go with the layout. The message says what to change.
    """
    if data_parallel not in DATA_PARALLEL:
        raise ConfigError(f"data_parallel {data_parallel!r} is not one of {', '.join(DATA_PARALLEL)}")
    if data_parallel == "hsdp" and layout.dp_replicate == 1:
        raise LayoutError(
            f"hsdp keeps replicas of a model that is sharded over dp_shard, and the layout {layout} has one replica: "
            f"give dp_replicate, or use fsdp"
        )
    others = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    other_sizes = " · ".join(f"{axis} {getattr(layout, axis)}" for axis in others)
    if data_parallel == "ddp" and others:
        without = " · ".join(f"{axis} 1" for axis in others)
        raise LayoutError(
            f"ddp keeps the full model on every rank, which does not go with {other_sizes}: use zero1 or fsdp, or "
            f"{without}"
        )
    # These do not shard the model, so one axis of replicas is all that they use.
    is_mixed = layout.dp_shard > 1 or bool(others)
    if data_parallel in UNSHARDED and layout.dp_replicate > 1 and is_mixed:
        with_others = f"dp_shard {layout.dp_shard}" if layout.dp_shard > 1 else other_sizes
        raise LayoutError(
            f"{data_parallel} has one data-parallel axis, and the layout has dp_replicate {layout.dp_replicate} and "
            f"{with_others}: use hsdp, or leave dp_replicate 1"
        )


def batch_sizes(
    batch_size: int | None,
    global_batch_size: int | None,
    dp: int,
    default: int,
) -> tuple[int, int]:
    """Samples of one step: on each data-parallel coordinate, and over all of them.

    Args:
        batch_size: samples on each coordinate. None: it was not given.
        global_batch_size: samples over all coordinates. None: it was not given.
        dp: number of data-parallel coordinates.
        default: samples on each coordinate, if neither was given.

    Raises:
        LayoutError: one is not positive, both contradict each other, or the global batch does not divide over `dp`.
    """
    # A command line shows the flags of these fields.
    local_name = config_field("batch_size")
    global_name = config_field("global_batch_size")
    for name, value in ((local_name, batch_size), (global_name, global_batch_size)):
        if value is not None and value < 1:
            raise LayoutError(f"{name} {value}: it must be at least 1")
    if global_batch_size is None:
        batch_size = batch_size or default
        return batch_size, batch_size * dp
    if global_batch_size % dp:
        raise LayoutError(
            f"{global_name} {global_batch_size} does not divide over {dp} data-parallel coordinates",
        )
    if batch_size is not None and batch_size * dp != global_batch_size:
        raise LayoutError(
            f"{local_name} {batch_size} on {dp} data-parallel coordinates is {batch_size * dp} samples a step, not "
            f"{global_name} {global_batch_size}: give one of them",
        )
    return global_batch_size // dp, global_batch_size
