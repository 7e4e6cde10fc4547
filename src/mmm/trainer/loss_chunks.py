"""In how many chunks of the sequence a language model computes its loss: decided before the ranks meet."""

from __future__ import annotations

import math

from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm.parallel.plan import Plan, find

# Bytes of the full logits on a rank above which the loss is computed in chunks. A chunk has a quarter of that.
LOGITS = 1_000_000_000


def check_chunks(chunks: int, tokens: int) -> None:
    """Raises ConfigError if a sequence has fewer tokens on a rank than the loss has chunks."""
    if not 1 <= chunks <= tokens:
        raise ConfigError(
            f"--loss_chunks {chunks}: it must be at least 1, and at most the {tokens} tokens of a sequence that a rank "
            f"has"
        )


def logits_bytes(
    model: nn.Module, plan: Plan, layout: Layout, sample: Tensor, microbatches: int, element_size: int
) -> int:
    """Bytes of the logits of one micro-batch on a rank. 0 if the plan names no output matrix.

    Args:
        sample: the tokens of a step on one data-parallel coordinate, (local batch, seq).
        element_size: bytes of a logit.
    """
    # tp shards the vocabulary, and cp the sequence.
    vocabulary = sum(math.ceil(output.out_features / layout.tp) for output in find(model, plan.output))  # type: ignore
    samples = math.ceil(len(sample) / microbatches)
    tokens = samples * sample.shape[1] // layout.cp
    return vocabulary * tokens * element_size


def chunks_for(logits: int, tokens: int) -> int:
    """As many chunks as keep the logits small; 1 if they are.

    Args:
        logits: bytes of the full logits on a rank.
        tokens: tokens of a sequence on a rank: a chunk has at least one.
    """
    if logits <= LOGITS:
        return 1
    return min(math.ceil(4 * logits / LOGITS), tokens)
