"""Flags of the mesh, and of the techniques on it: for programs that take any layout their model has axes for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from mmm.layout import Layout, ScheduleName, check_data_parallel
from mmm.trainer.config.options import PIPELINE, SHARDED_SEQUENCE, Need, RunOptions, TensorParallelOptions

DataParallel = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Flags of what is too large for one device: computed piece by piece, or kept on the host."""

    loss_chunks: int | None = None
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist. Default: 1, or as many
    as keep them small where they would have more than 1 GB on a rank."""
    tile: int = 1
    """Tiles of the sequence that each MLP is computed in, and recomputed in backward: 1 / tile of its activations."""
    offload: bool = False
    """Keep a rank's part of parameters, gradients and optimizer state on the host, and update it there."""


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(RunOptions):
    """How a model lies over data-parallel ranks."""

    parallel: DataParallel = "fsdp"
    """ddp: replicas. zero1, zero2: replicas, sharded optimizer state (and gradients). fsdp, zero3: everything sharded.
    hsdp: replicas of that."""
    dp_replicate: Annotated[int, tyro.conf.arg(aliases=["--replicas"])] = 0
    """Replicas of the model, where it is sharded over the other data-parallel ranks. 0: two under hsdp, else one."""

    def axes(self, ranks: int) -> dict[str, int]:
        return super().axes(ranks) | {"dp_replicate": self.dp_replicate or (2 if self.parallel == "hsdp" else 1)}

    def layout(self, ranks: int) -> Layout:
        """As `RunOptions.layout`; a LayoutError also where the data-parallel technique does not go with the sizes."""
        layout = super().layout(ranks)
        check_data_parallel(self.parallel, layout)
        return layout


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(TensorParallelOptions, DataParallelOptions):
    """The sizes of all axes, and how each is used."""

    RUNS_ON_MPS: ClassVar = True
    NEEDS: ClassVar[dict[str, Need]] = {"schedule": PIPELINE, "stages_per_rank": PIPELINE, "cp_style": SHARDED_SEQUENCE}
    pp: int = 1
    """Ranks along pp: over how many the layers are split."""
    dp_shard: int = -1
    """Data-parallel ranks that a replica of the model is sharded over; -1: all that the other axes leave."""
    ep: int = 1
    """Ranks that share the experts of a model out: a divisor of --dp_shard, whose ranks they are."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """The parts of a model that FSDP frees after forward, and gathers again for backward. auto: all but the last, with
    which backward begins; with pp, none. always: less memory. never: less communication."""
    cp: int = 1
    """Ranks along cp: over how many each sequence is sharded."""
    schedule: ScheduleName | None = None
    """With pp, the order of forwards and backwards. Default: 1F1B."""
    stages_per_rank: int | None = None
    """With pp. Default: the fewest that the schedule takes, 1 or 2."""
    microbatches: Annotated[int | None, tyro.conf.arg(aliases=["--accumulate"])] = None
    """Micro-batches that a step's batch goes through the model in: less memory, the same gradients. Default: 1, with
    pp the fewest that the schedule takes."""
    cp_style: Literal["ring", "ulysses"] | None = None
    """With cp. ring: keys and values go round. ulysses: attention is sharded over its heads, which cp · tp divides.
    Default: ring."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in backward instead of keeping them."""
