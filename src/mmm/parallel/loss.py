"""The local loss: this rank's sum divided by the global count. The ranks' local losses add up to the global mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.layout import PADDING
from mmm.parallel.double_backward import refuse_create_graph

# Function of (output, targets, count) that returns the local loss.
Loss = Callable[[Tensor, Tensor, int | Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor, count: int | Tensor) -> Tensor:
    """The local loss of a batch: the sum of its cross-entropies, divided by the global `count`.

    The local losses of all data-parallel coordinates add up to the mean over the global batch, and so do gradients.

    Args:
        logits: (…, classes), full, or sharded over the classes. If sharded, call this function, and backward, inside
            ``loss_parallel()``.
        targets: (…) int64; `PADDING` where there is none.
        count: number of targets in the global batch.

    Returns:
        Scalar, at least float32.
    """
    if isinstance(logits, DTensor) and logits.requires_grad:
        is_full = all(placement.is_replicate() for placement in logits.placements)
        if not is_full:
            logits.register_hook(_refuse)
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    # (tokens, classes) and (tokens,)
    flat_logits = logits.to(wide_dtype).flatten(0, -2)
    flat_targets = targets.flatten()
    total = F.cross_entropy(flat_logits, flat_targets, reduction="sum", ignore_index=PADDING)
    return total / count


def _refuse(_: Tensor) -> None:
    """Refuse a second derivative: `loss_parallel` computes the gradient of softmax and loss in one, and the gradient of
    that would be wrong."""
    refuse_create_graph("the loss of logits that tp shards", "its second derivative would be wrong; gather them first")
