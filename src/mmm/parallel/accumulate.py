"""Gradient accumulation: several backwards to one step, and the ranks talk at the last of them only."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from mmm.parallel.ddp import DDP


def sync_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next forward and backward reduce gradients over the data-parallel ranks.

    ``False`` for every micro-batch but the last of a step, which then reduces what has been added up. ZeRO-1 and ZeRO-2
    reduce at every backward all the same: they keep a rank's own part of the sum alone.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
    elif isinstance(model, DDP):
        model.ddp.require_backward_grad_sync = wanted  # type: ignore[attr-defined]
