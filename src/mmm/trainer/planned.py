"""How a job's model goes onto its layout by the package: decided before the ranks meet."""

from __future__ import annotations

import math
from dataclasses import replace

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan, find
from mmm.trainer.job import Job

LOGITS = 1_000_000_000  # bytes on a rank, above which the loss is computed in chunks of a quarter of that


def with_plan(job: Job, plan: Plan, dtype: str, tokens: int | None = None) -> Job:
    """The job with the plan of its model, which has to go onto its layout with its techniques. Needs no process group.

    Args:
        dtype: ``auto``, or the name of a precision.
        tokens: of a sequence, on one rank; None where nothing is computed in pieces.

    Raises:
        UserError: anything that does not fit.
    """
    if tokens is not None:
        check_pieces(job.techniques, tokens)
    partition = partition_model(job.model, plan, job.layout, job.techniques, job.sample, dtype)
    return replace(job, plan=plan, partition=partition)


def check_pieces(techniques: Techniques, tokens: int) -> None:
    """Raises ConfigError where a sequence has fewer tokens on a rank than it is to be computed in pieces."""
    if not 1 <= techniques.loss_chunks <= tokens:
        raise ConfigError(
            f"--loss_chunks {techniques.loss_chunks}: it must be at least 1, and at most the {tokens} tokens of a "
            f"sequence that a rank has"
        )


def chunk_loss(job: Job, dtype: str) -> Job:
    """With the loss in so many chunks that the logits stay small, where the user leaves it to us."""
    logits = logits_bytes(job, dtype)
    if logits <= LOGITS:
        return job
    chunks = min(math.ceil(4 * logits / LOGITS), job.sample.shape[1] // job.layout.cp)
    note = f"--loss_chunks {chunks}: the full logits would have {logits / 1e9:.1f} GB on a rank"
    return replace(job, techniques=replace(job.techniques, loss_chunks=chunks), notes=(*job.notes, note))


def logits_bytes(job: Job, dtype: str) -> int:
    """Of a micro-batch on a rank, in float32 or wider; 0 where the plan names no output matrix."""
    layout, sample = job.layout, job.sample  # (local batch, seq)
    vocabulary = sum(-(-output.out_features // layout.tp) for output in find(job.model, job.plan.output))  # type: ignore
    tokens = -(-len(sample) // job.partition.microbatches) * math.prod(sample.shape[1:2]) // layout.cp
    return vocabulary * tokens * (8 if dtype == "fp64" else 4)
