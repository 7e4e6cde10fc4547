"""The flags of the mesh: the group ``layout``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

from mmm.layout import Layout, ScheduleName, Techniques, check_data_parallel
from mmm.trainer.config.run import FLAGS, TensorParallelOptions, check_effect, flags_of

DataParallel = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


def fields_of(kind: type, *groups: Any) -> dict[str, Any]:
    """What groups of flags say of the fields of `Layout` or `Techniques`; not those that are None."""
    flags = {name: value for group in groups for name, value in flags_of(group).items()}
    values = {field.name: flags.get(FLAGS.get(field.name, field.name)) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def techniques_of(*groups: Any) -> Techniques:
    """The techniques that groups of flags ask for; the others are as `Techniques` has them."""
    return Techniques(**fields_of(Techniques, *groups))


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """How the model lies over data-parallel ranks."""

    parallel: DataParallel = "fsdp"
    """ddp: replicas. zero1, zero2: replicas, sharded optimizer state (and gradients). fsdp, zero3: everything sharded.
    hsdp: replicas of that."""
    dp_replicate: Annotated[int, tyro.conf.arg(aliases=["--replicas"])] = 0
    """Replicas of the model, where it is sharded over the other data-parallel ranks. 0: two under hsdp, else one."""

    def fit(self, ranks: int) -> Layout:
        """The mesh for that many ranks.

        Raises:
            ConfigError: a flag that has no effect on it.
            LayoutError: sizes that do not multiply to it; the data-parallel technique does not go with them.
        """
        replicas = self.dp_replicate or (2 if self.parallel == "hsdp" else 1)
        layout = Layout(**fields_of(Layout, self) | {"dp_replicate": replicas}).fit(ranks)
        self.check_layout(layout)
        check_data_parallel(self.parallel, layout)
        return layout

    def check_layout(self, layout: Layout) -> None:
        """Raises ConfigError for a flag that has no effect on a layout."""


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(TensorParallelOptions, DataParallelOptions):
    """The sizes of the axes, and how each is used."""

    pp: int = 1
    """Ranks along pp: over how many the layers are split."""
    dp_shard: int = -1
    """Data-parallel ranks that a replica of the model is sharded over; -1: all that the other axes leave."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """The parts of a model that FSDP frees after forward, and gathers again for backward. auto: all but the last, with
    which backward begins; with pp, none. always: less memory. never: less communication."""
    schedule: ScheduleName | None = None
    """With pp, the order of forwards and backwards. Default: 1F1B."""
    stages_per_rank: int | None = None
    """With pp. Default: the fewest that the schedule takes, 1 or 2."""
    microbatches: Annotated[int | None, tyro.conf.arg(aliases=["--accumulate"])] = None
    """Micro-batches that a step's batch goes through the model in: less memory, the same gradients. Default: 1, with
    pp the fewest that the schedule takes."""

    def check_layout(self, layout: Layout) -> None:
        given = {"schedule": self.schedule, "stages_per_rank": self.stages_per_rank}
        check_effect(layout.pp > 1, "--pp", "there is one stage, the model", "--pp 2", **given)


@dataclass(frozen=True, kw_only=True)
class SequenceLayoutOptions(LayoutOptions):
    """The sizes of the axes, and how each is used: of a model with a sequence, and perhaps experts."""

    ep: int = 1
    """Ranks that share the experts of a model out: a divisor of --dp_shard, whose ranks they are."""
    cp: int = 1
    """Ranks along cp: over how many each sequence is sharded."""
    cp_style: Literal["ring", "ulysses", "usp"] | None = None
    """With cp. ring: keys and values go round. ulysses: attention is sharded over its heads, which cp · tp divides.
    usp: ulysses among --ulysses neighbours, a ring between these groups. Default: ring."""
    ulysses: int | None = None
    """With --cp_style usp: a divisor of --cp that, times --tp, divides the heads. Default: the most on a host."""

    def check_layout(self, layout: Layout) -> None:
        super().check_layout(layout)
        check_cp_effect(layout, self.cp_style, self.ulysses)


def check_cp_effect(layout: Layout, cp_style: str | None, ulysses: int | None) -> None:
    """Raises ConfigError for a --cp_style or --ulysses that has no effect."""
    check_effect(layout.cp > 1, "--cp", "no sequence is sharded", "--cp 2", cp_style=cp_style)
    why = "a ring is one of all of cp, and so is ulysses"
    check_effect(cp_style == "usp", "--cp_style usp", why, "--cp_style usp", ulysses=ulysses)
