"""How a run's model goes onto its layout by the package, decided before its ranks meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plan import Plan, find
from mmm.trainer.config.spec import TrainingSpec

LOGITS = 1_000_000_000  # bytes on a rank, above which the loss is computed in chunks of a quarter of that


@dataclass(frozen=True, kw_only=True)
class ParallelSpec(TrainingSpec):
    """What a run needs, and how `mmm.parallel` parallelizes its model.

    Attributes:
        plan: how the model is sharded.
        partition: into pipeline stages.
    """

    plan: Plan
    partition: Partition


def check_pieces(techniques: Techniques, tokens: int) -> None:
    """Raises ConfigError where a sequence has fewer tokens on a rank than it is to be computed in pieces."""
    if not 1 <= techniques.loss_chunks <= tokens:
        raise ConfigError(
            f"--loss_chunks {techniques.loss_chunks}: it must be at least 1, and at most the {tokens} tokens of a "
            f"sequence that a rank has"
        )


def resolve_plan(spec: TrainingSpec, plan: Plan, dtype: str, tokens: int | None = None) -> ParallelSpec:
    """Check how a model goes onto a layout with the techniques asked for; needs no process group.

    Args:
        dtype: ``auto``, or the name of a precision.
        tokens: of a sequence, on one rank; None where nothing is computed in pieces.

    Raises:
        UserError: anything that does not fit.
    """
    if tokens is not None:
        check_pieces(spec.techniques, tokens)
    partition = partition_model(spec.model, plan, spec.layout, spec.techniques, spec.sample, dtype)
    return ParallelSpec(**vars(spec), plan=plan, partition=partition)


def chunk_loss(spec: ParallelSpec, dtype: str) -> ParallelSpec:
    """With the loss in so many chunks that the logits stay small, where the user leaves it to us."""
    logits = logits_bytes(spec, dtype)
    if logits <= LOGITS:
        return spec
    chunks = min(math.ceil(4 * logits / LOGITS), spec.sample.shape[1] // spec.layout.cp)
    note = f"--loss_chunks {chunks}: the full logits would have {logits / 1e9:.1f} GB on a rank"
    return replace(spec, techniques=replace(spec.techniques, loss_chunks=chunks), notes=(*spec.notes, note))


def logits_bytes(spec: ParallelSpec, dtype: str) -> int:
    """Of a micro-batch on a rank, in float32 or wider; 0 where the plan names no output matrix."""
    layout, sample = spec.layout, spec.sample  # (local batch, seq)
    vocabulary = sum(-(-output.out_features // layout.tp) for output in find(spec.model, spec.plan.output))  # type: ignore
    tokens = -(-len(sample) // spec.partition.microbatches) * math.prod(sample.shape[1:2]) // layout.cp
    return vocabulary * tokens * (8 if dtype == "fp64" else 4)
