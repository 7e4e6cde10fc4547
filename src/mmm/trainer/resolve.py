"""Everything that a run needs, decided before its ranks meet: what does not fit is refused by each rank alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmm.analysis.footprint import Footprint, footprint_of
from mmm.data import Batch, Tokens
from mmm.errors import ConfigError
from mmm.parallel.mesh import Layout
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import Plan
from mmm.parallel.techniques import Techniques
from mmm.trainer.options import RunOptions
from mmm.trainer.report import model_summary


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a run needs.

    Attributes:
        layout: fitted to the number of ranks. techniques: on it.
        sizes: of the model. model: an `nn.Module` on the meta device, shapes without memory.
        plan: how it is sharded. partition: into pipeline stages.
        sample: what a step's forward takes of one data-parallel coordinate, (local batch, …), on the meta device.
        local_batch_size, global_batch_size: samples of a step, of one data-parallel coordinate and of all.
        data: to train on, and to evaluate on; None for a summary of the model. steps: of the run.
        footprint: what the ranks will hold. notes: what was chosen where no flag says.
    """

    layout: Layout
    techniques: Techniques
    sizes: Any
    model: Any
    plan: Plan
    partition: Partition
    sample: Tensor
    local_batch_size: int
    global_batch_size: int
    data: Any
    steps: int
    footprint: Footprint
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """The full model, before it is sharded."""
        return model_summary(self.model, self.sample)

    def describe(self) -> dict[str, Any]:
        """What the record keeps."""
        return {"model": self.sizes, "global_batch_size": self.global_batch_size, "steps": self.steps}

    def local_batch(self, tokens: Tokens, step: int, coordinate: int) -> Batch:
        """The samples of a step of a data-parallel coordinate."""
        return tokens.batch(step, self.global_batch_size, coordinate * self.local_batch_size, self.local_batch_size)


def check_pieces(techniques: Techniques, tokens: int) -> None:
    """Raises ConfigError where a sequence has fewer tokens on a rank than it is to be computed in pieces."""
    for name in ("loss_chunks", "tile"):
        if not 1 <= (value := getattr(techniques, name)) <= tokens:
            raise ConfigError(
                f"--{name} {value}: it must be at least 1, and at most the {tokens} tokens (of an image, patches) of a "
                f"sequence that a rank has"
            )


def resolve_model(
    options: RunOptions,
    layout: Layout,
    sizes: Any,
    model: nn.Module,
    plan: Plan,
    sample: Tensor,
    data: Any,
    steps: int,
    tokens: int | None = None,
    notes: tuple[str, ...] = (),
) -> Resolved:
    """Check how a model goes onto a layout with the techniques that the options ask for; needs no process group.

    Args:
        layout: fitted. sizes, model, plan, sample, data, steps, notes: as in `Resolved`.
        tokens: of a sequence, on one rank; None where nothing is computed in pieces.

    Raises:
        UserError: anything that does not fit.
    """
    techniques = options.techniques()
    if tokens is not None:
        check_pieces(techniques, tokens)
    partition = partition_model(model, plan, layout, techniques, sample, options.dtype)
    return Resolved(
        layout=layout,
        techniques=techniques,
        sizes=sizes,
        model=model,
        plan=plan,
        partition=partition,
        sample=sample,
        local_batch_size=len(sample),
        global_batch_size=len(sample) * layout.dp,
        data=data,
        steps=steps,
        footprint=footprint_of(model, options.optimizer, techniques, partition, layout.pp),
        notes=notes,
    )
