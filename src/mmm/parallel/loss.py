"""The loss: a global sum over a global count, whatever the mesh."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def cross_entropy(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """This rank's share of the mean cross-entropy: its sum over the global `count`.

    The shares of all data-parallel coordinates add up to the mean over the global batch, and so do their gradients.

    Args:
        logits: (…, classes), whole, or cut over the classes (then, and for its backward, inside ``loss_parallel()``).
        targets: (…) int64. count: targets in the global batch.

    Returns:
        Scalar, at least float32.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")
    return total / count


def local_value(loss: Tensor) -> float:
    """The number in a scalar, plain or on a mesh where all ranks hold the same."""
    loss = loss.detach()
    return float(loss.to_local() if isinstance(loss, DTensor) else loss)
