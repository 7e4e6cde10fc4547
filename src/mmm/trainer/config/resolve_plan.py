"""How a run's model goes onto its layout by the package, decided before its ranks meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.parallel.footprint import Footprint, footprint_of
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import Plan, find
from mmm.parallel.plans.transformer import transformer_plan
from mmm.trainer.config.resolve import Resolved
from mmm.trainer.config.resolve_text import resolve_own

LOGITS = 1_000_000_000  # bytes on a rank, above which the loss is computed in chunks of a quarter of that


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


def resolve(options: Any) -> ResolvedPlan:
    """`resolve_own`, and how `mmm.parallel` parallelizes the Transformer."""
    own = resolve_own(options)
    return resolve_plan(own, transformer_plan(own.sizes), options.seq_length // (own.layout.cp * own.layout.tp))
