"""How the package puts a job's model onto its layout: decided before the ranks meet."""

from __future__ import annotations

import math
from dataclasses import replace

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan, find
from mmm.trainer.job import Job

# Bytes of the full logits on a rank above which the loss is computed in chunks. A chunk has a quarter of that.
LOGITS = 1_000_000_000


def with_plan(job: Job, plan: Plan, dtype: str, tokens: int | None = None) -> Job:
    """The job with the plan of its model, and its partition into stages. Needs no process group.

    Args:
        job: the job.
        plan: how the model is sharded.
        dtype: ``auto``, or the name of a precision.
        tokens: number of tokens of a sequence on one rank. None if nothing is computed in chunks of the sequence.

    Raises:
        UserError: the model does not go onto the layout with these techniques.
    """
    if tokens is not None:
        check_chunks(job.techniques, tokens)
    partition = partition_model(
        job.model,
        plan,
        job.layout,
        job.techniques,
        job.sample,
        dtype,
    )
    return replace(job, plan=plan, partition=partition)


def check_chunks(techniques: Techniques, tokens: int) -> None:
    """Raises ConfigError if a sequence has fewer tokens on a rank than the loss has chunks."""
    if not 1 <= techniques.loss_chunks <= tokens:
        raise ConfigError(
            f"--loss_chunks {techniques.loss_chunks}: it must be at least 1, and at most the {tokens} tokens of a "
            f"sequence that a rank has"
        )


def chunk_loss(job: Job, dtype: str) -> Job:
    """The job with the loss in as many chunks as keep the logits small. For a job whose user left that to us.

    Args:
        job: the job.
        dtype: ``auto``, or the name of a precision.
    """
    logits = logits_bytes(job, dtype)
    if logits <= LOGITS:
        return job
    chunks = math.ceil(4 * logits / LOGITS)
    # A chunk has at least one token.
    local_tokens = job.sample.shape[1] // job.layout.cp
    chunks = min(chunks, local_tokens)
    note = f"--loss_chunks {chunks}: the full logits would have {logits / 1e9:.1f} GB on a rank"
    techniques = replace(job.techniques, loss_chunks=chunks)
    return replace(job, techniques=techniques, notes=(*job.notes, note))


def logits_bytes(job: Job, dtype: str) -> int:
    """Bytes of the logits of one micro-batch on a rank, in float32 or wider. 0 if the plan names no output matrix."""
    layout = job.layout
    # (local batch, seq)
    sample = job.sample
    vocabulary = 0
    for output in find(job.model, job.plan.output):
        # tp shards the vocabulary.
        vocabulary += -(-output.out_features // layout.tp)  # type: ignore
    samples = -(-len(sample) // job.partition.microbatches)
    tokens = samples * math.prod(sample.shape[1:2]) // layout.cp
    element_size = 8 if dtype == "fp64" else 4
    return vocabulary * tokens * element_size
