"""Everything that a run needs, decided before its ranks meet: what does not fit is refused by each rank alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmm.data import Batch, Tokens
from mmm.layout import Layout
from mmm.parallel.footprint import Footprint, footprint_of
from mmm.trainer.config.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a run needs.

    Attributes:
        layout: fitted to the number of ranks.
        sizes: of the model. model: an `nn.Module` on the meta device, shapes without memory.
        sample: what a step's forward takes of one data-parallel coordinate, (local batch, …), on the meta device.
        data: to train on, and to evaluate on; None for a summary of the model. steps: of the run.
        notes: what was chosen where no flag says.
    """

    options: RunOptions
    layout: Layout
    sizes: Any
    model: Any
    sample: Tensor
    data: Any
    steps: int
    notes: tuple[str, ...] = ()

    @property
    def local_batch_size(self) -> int:
        """Samples of a step, of one data-parallel coordinate."""
        return len(self.sample)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, of all data-parallel coordinates."""
        return len(self.sample) * self.layout.dp

    @property
    def footprint(self) -> Footprint:
        """What the ranks will hold."""
        return footprint_of(self.model, self.options.optimizer, self.options.techniques())

    def summary(self) -> str:
        """The full model, before it is sharded."""
        return model_summary(self.model, self.sample)

    def describe(self) -> dict[str, Any]:
        """What the record keeps."""
        return {"model": self.sizes, "global_batch_size": self.global_batch_size, "steps": self.steps}

    def local_batch(self, tokens: Tokens, step: int, coordinate: int) -> Batch:
        """The samples of a step of a data-parallel coordinate."""
        return tokens.batch(step, self.global_batch_size, coordinate * self.local_batch_size, self.local_batch_size)


def model_summary(model: nn.Module, inputs: Tensor) -> str:
    """torchinfo's summary of a model on the meta device, which costs no memory and next to no time.

    Args:
        inputs: what forward takes, on the meta device.
    """
    import torchinfo

    model = copy.deepcopy(model).to("meta")  # torchinfo moves what it is given, buffers with values as well
    columns = ("output_size", "num_params")
    return str(torchinfo.summary(model, input_data=inputs, depth=2, col_names=columns, verbose=0, device="meta"))
