"""DDP: every rank has the full model; gradients are all-reduced while backward is still running.

Source: Li et al., "PyTorch Distributed", 2020; ``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mmm.parallel.data.replicas import Replicas


class ScaleGradient(torch.autograd.Function):
    """The identity in forward; in backward, the gradient times `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class DDP(Replicas):
    """`DistributedDataParallel` whose gradients are the sum over the ranks, not the mean.

    DDP divides the sum by the number of ranks N. The gradient that enters the model from the loss is therefore
    multiplied by N. (Multiplying in a communication hook instead would be wrong with several backwards a step: what
    earlier ones left in ``.grad`` is already a sum over the ranks, and would be summed again.)
    """

    def connect(self) -> None:
        group = self.mesh.get_group()
        # In a list, so that it is not a submodule, which would give the parameters a second name.
        self.ddp = [DistributedDataParallel(self.module, process_group=group, gradient_as_bucket_view=True)]
        self.connected = True

    def _run(self, *inputs: Any, **named: Any) -> Tensor:
        return ScaleGradient.apply(self.ddp[0](*inputs, **named), self.mesh.size())

    def sync_gradients(self, now: bool) -> None:
        self.ddp[0].require_backward_grad_sync = now  # what DDP's no_sync() sets
