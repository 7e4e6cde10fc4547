"""Flags of the mesh, and of the techniques on it: for programs that take any layout their model has axes for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import tyro

from mmm.parallel.data.apply import check_data_parallel
from mmm.parallel.mesh import Layout
from mmm.parallel.techniques import ScheduleName, Techniques
from mmm.trainer.needs import CUT_SEQUENCE, PIPELINE, Need, check_needs

DataParallel = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """How a model lies over data-parallel ranks."""

    parallel: DataParallel = "fsdp"
    """ddp: whole copies. zero1, zero2: whole parameters, cut optimizer state (and gradients). fsdp, zero3: everything
    cut. hsdp: copies of that."""
    dp_replicate: Annotated[int, tyro.conf.arg(aliases=["--replicas"])] = 0
    """Copies of the model, where it is cut over the other data-parallel ranks. 0: two under hsdp, else one."""

    def axes(self) -> dict[str, int]:
        """Of the axes that flags give."""
        return {"dp_replicate": self.dp_replicate or (2 if self.parallel == "hsdp" else 1)}

    def layout(self, world_size: int) -> Layout:
        """The mesh for that many ranks.

        Raises:
            LayoutError: the sizes do not multiply to it, or are not what --parallel takes.
            ConfigError: a flag that has no effect on it (`mmm.trainer.needs`).
        """
        layout = Layout(**self.axes()).fit(world_size)
        check_data_parallel(self.parallel, layout)
        check_needs(self, layout)
        return layout


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(DataParallelOptions):
    """The sizes of all axes, and how each is used."""

    NEEDS: ClassVar[dict[str, Need]] = {"schedule": PIPELINE, "stages_per_rank": PIPELINE, "cp_style": CUT_SEQUENCE}
    pp: int = 1
    """Ranks along pp: over how many the layers are cut."""
    dp_shard: int = -1
    """Data-parallel ranks that a copy of the model is cut over; -1: all that the other axes leave."""
    ep: int = 1
    """Ranks that share the experts of a model out: a divisor of --dp_shard, whose ranks they are."""
    cp: int = 1
    """Ranks along cp: over how many each sequence is cut."""
    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is cut."""
    schedule: ScheduleName | None = None
    """With pp, the order of forwards and backwards. Default: 1F1B."""
    stages_per_rank: int | None = None
    """With pp. Default: the fewest that the schedule takes, 1 or 2."""
    microbatches: Annotated[int | None, tyro.conf.arg(aliases=["--accumulate"])] = None
    """Parts that a step's batch goes through the model in: less memory, the same gradients. Default: 1, with pp the
    fewest that the schedule takes."""
    cp_style: Literal["ring", "ulysses"] | None = None
    """With cp. ring: keys and values go round. ulysses: attention is cut over its heads, which cp · tp divides.
    Default: ring."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Work activations out again in backward instead of keeping them."""

    def axes(self) -> dict[str, int]:
        sizes = {"pp": self.pp, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tpsize, "ep": self.ep}
        return super().axes() | sizes

    def techniques(self, compile: bool, **memory: Any) -> Techniques:
        """What `mmm.parallel.assemble` takes. compile: the flag of the run. memory: of `MemoryOptions`."""
        given: dict[str, Any] = {"cp_style": self.cp_style, "schedule": self.schedule}
        return Techniques(
            data_parallel=self.parallel,
            microbatches=self.microbatches,
            stages_per_rank=self.stages_per_rank,
            checkpointing=self.activation_checkpointing,
            compile=compile,
            **{name: value for name, value in given.items() if value is not None},
            **memory,
        )
