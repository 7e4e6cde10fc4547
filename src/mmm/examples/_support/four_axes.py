"""Flags of the example whose mesh has four axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from mmm.errors import ConfigError
from mmm.examples._support.text_options import TextExampleOptions
from mmm.trainer.config.options import PIPELINE, Need
from mmm.trainer.config.transformer_options import Preset
from mmm.trainer.run.core import Run


@dataclass(frozen=True, kw_only=True)
class FourAxesOptions(TextExampleOptions):
    """Flags of a small Transformer on a mesh of pp × dp × cp × tp, whose sizes are chosen where none is given."""

    NEEDS: ClassVar[dict[str, Need]] = {"schedule": PIPELINE, "microbatches": PIPELINE}
    model: str = "transformer"
    """No other: the ViT on these axes is mmm.trainer.vit, the CNN mmm.trainer.cnn."""
    pp: int | None = None
    """Ranks along pp. Where no axis has a size, each in turn gets 2 ranks, as long as they divide; else 1."""
    dp_shard: Annotated[int | None, tyro.conf.arg(aliases=["--dp"])] = None
    """Data-parallel ranks. Default, and -1: all that the other axes leave."""
    cp: int | None = None
    """Ranks along cp. Default: as of --pp."""
    tpsize: Annotated[int | None, tyro.conf.arg(aliases=["--tp"])] = None  # type: ignore[assignment]
    """Ranks along tp. Default: as of --pp."""
    schedule: Literal["GPipe", "1F1B"] | None = None
    microbatches: int | None = None
    """Parts that a batch goes through the stages in. Default: pp."""
    preset: Preset = "debug"
    n_layers: int | None = 4
    n_heads: int | None = 8
    n_kv_heads: int | None = 4
    ffn_dim: int | None = 192
    eval_every: int = 0
    default_max_iters = 20
    default_batch_size = 8

    def axes(self, ranks: int) -> dict[str, int]:
        if self.model != "transformer":
            raise ConfigError(f"--model {self.model}: the ViT is mmm.trainer.vit, the CNN mmm.trainer.cnn")
        asked = {"pp": self.pp, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tpsize}
        unset = {"pp": 1, "dp_shard": -1, "cp": 1, "tp": 1}
        sizes = {axis: unset[axis] if size is None else size for axis, size in asked.items()}
        if not self.chooses():
            return sizes
        for place, axis in enumerate(("pp", "tp", "dp_shard", "cp"), start=1):
            if axis != "dp_shard" and ranks % 2**place == 0:
                sizes[axis] = 2
        return sizes

    def chooses(self) -> bool:
        return all(size is None for size in (self.pp, self.dp_shard, self.cp, self.tpsize))

    def note_choice(self, run: Run) -> None:
        """Say which layout was chosen."""
        if self.chooses():
            run.note(f"no axis was given a size: layout {run.layout} chosen for {run.layout.ranks} ranks")
