"""Everything that a run needs, decided before its ranks meet: what does not fit is refused by each rank alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmm.data import Batch, Tokens
from mmm.errors import ConfigError
from mmm.layout import Layout, Techniques
from mmm.parallel.memory.footprint import Footprint, footprint_of
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import Plan, find
from mmm.trainer.options import RunOptions
from mmm.trainer.report import model_summary

LOGITS = 1_000_000_000  # bytes on a rank, above which the loss is computed in chunks of a quarter of that


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


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan(Resolved):
    """What a run needs, and how `mmm.parallel` parallelizes its model.

    Attributes:
        techniques: on the layout. plan: how the model is sharded. partition: into pipeline stages.
    """

    techniques: Techniques
    plan: Plan
    partition: Partition

    @property
    def footprint(self) -> Footprint:
        techniques = self.options.techniques()
        return footprint_of(self.model, self.options.optimizer, techniques, self.partition, self.layout.pp)


def check_pieces(techniques: Techniques, tokens: int) -> None:
    """Raises ConfigError where a sequence has fewer tokens on a rank than it is to be computed in pieces."""
    for name in ("loss_chunks", "tile"):
        if not 1 <= (value := getattr(techniques, name)) <= tokens:
            raise ConfigError(
                f"--{name} {value}: it must be at least 1, and at most the {tokens} tokens (of an image, patches) of a "
                f"sequence that a rank has"
            )


def logits_bytes(resolved: Resolved, plan: Plan, microbatches: int) -> int:
    """Of a micro-batch on a rank, in float32 or wider; 0 where the plan names no output matrix."""
    layout, sample = resolved.layout, resolved.sample  # (local batch, seq)
    vocabulary = sum(-(-output.out_features // layout.tp) for output in find(resolved.model, plan.output))  # type: ignore
    tokens = -(-len(sample) // microbatches) * math.prod(sample.shape[1:2]) // layout.cp
    return vocabulary * tokens * (8 if resolved.options.dtype == "fp64" else 4)


def resolve_plan(resolved: Resolved, plan: Plan, tokens: int | None = None) -> ResolvedPlan:
    """Check how a model goes onto a layout with the techniques that the options ask for; needs no process group.

    Args:
        tokens: of a sequence, on one rank; None where nothing is computed in pieces.

    Raises:
        UserError: anything that does not fit.
    """
    techniques = resolved.options.techniques()
    if tokens is not None:
        check_pieces(techniques, tokens)
    options, layout, sample = resolved.options, resolved.layout, resolved.sample
    partition = partition_model(resolved.model, plan, layout, techniques, sample, options.dtype)
    if getattr(options, "loss_chunks", 1) is None:
        logits = logits_bytes(resolved, plan, partition.microbatches)
        if logits > LOGITS:
            chunks = min(math.ceil(4 * logits / LOGITS), sample.shape[1] // layout.cp)
            techniques = replace(techniques, loss_chunks=chunks)
            note = f"--loss_chunks {chunks}: the full logits would have {logits / 1e9:.1f} GB on a rank"
            resolved = replace(resolved, notes=(*resolved.notes, note))
    return ResolvedPlan(**vars(resolved), techniques=techniques, plan=plan, partition=partition)
