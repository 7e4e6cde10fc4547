"""Flags of the example whose mesh has four axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from mmm.examples._support.by_package import resolve
from mmm.examples._support.text import TextConfig
from mmm.layout import Layout
from mmm.runtime.ranks import whoami
from mmm.trainer.config.layout import fields_of, techniques_of
from mmm.trainer.config.model import TransformerOptions
from mmm.trainer.config.resolve_plan import ParallelSpec
from mmm.trainer.config.run import ValidationOptions, check_effect


@dataclass(frozen=True, kw_only=True)
class FourAxesOptions:
    """The sizes of the axes pp × dp × cp × tp, which are chosen where none is given."""

    pp: int | None = None
    """Ranks along pp. Where no axis has a size, each in turn gets 2 ranks, as long as they divide; else 1."""
    dp_shard: Annotated[int | None, tyro.conf.arg(aliases=["--dp"])] = None
    """Data-parallel ranks. Default, and -1: all that the other axes leave."""
    cp: int | None = None
    """Ranks along cp. Default: as of --pp."""
    tpsize: Annotated[int | None, tyro.conf.arg(aliases=["--tp"])] = None
    """Ranks along tp. Default: as of --pp."""
    schedule: Literal["GPipe", "1F1B"] | None = None
    microbatches: int | None = None
    """Parts that a batch goes through the stages in. Default: pp."""

    def fit(self, ranks: int) -> Layout:
        """The mesh for that many ranks.

        Raises:
            ConfigError: a flag that has no effect on it.
            LayoutError: sizes that do not multiply to it.
        """
        sizes = fields_of(Layout, self)
        if all(size is None for size in (self.pp, self.dp_shard, self.cp, self.tpsize)):
            for place, axis in enumerate(("pp", "tp", "dp_shard", "cp"), start=1):
                if axis != "dp_shard" and ranks % 2**place == 0:
                    sizes[axis] = 2
        layout = Layout(**sizes).fit(ranks)
        given = {"schedule": self.schedule, "microbatches": self.microbatches}
        check_effect(layout.pp > 1, "--pp", "there is one stage, the model", "--pp 2", **given)
        return layout


@dataclass(frozen=True, kw_only=True)
class AxesConfig:
    """A group of flags; that of the last base stands first in ``--help``."""

    layout: FourAxesOptions = FourAxesOptions()


@dataclass(frozen=True, kw_only=True)
class FourAxesConfig(TextConfig, AxesConfig):
    """The groups of flags of a small Transformer on four axes."""

    model: TransformerOptions = TransformerOptions(preset="debug", n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=192)
    evaluation: ValidationOptions = ValidationOptions(eval_every=0)


def resolve_four_axes(config: FourAxesConfig) -> ParallelSpec:
    """`resolve`, on the layout that the flags ask for."""
    layout = config.layout.fit(whoami().world_size)
    return resolve(config, layout, techniques_of(config.layout), batch_size=8, max_iters=20)
