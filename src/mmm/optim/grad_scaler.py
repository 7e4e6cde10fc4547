"""Steps that all ranks skip or none: loss scaling for fp16, and losses or gradients that are not finite.

fp16 ends at 65,504. The loss is scaled up, so that small gradients do not become 0, and the gradients are scaled down
again before the optimizer's step. Where that has made one infinite, the step is skipped and the scale halved. With a
model sharded over ranks the infinite element may be one rank's alone::

    rank        0         1         2         3
    gradients   finite    finite    inf       finite
                  └─────────┴────┬────┴─────────┘        all-reduce, maximum, over the whole run
    step        skipped   skipped   skipped   skipped

PyTorch's own scaler asks, for DTensors, the ranks over which the *first* gradient is sharded. Where that one is
replicated (a norm, a convolution under tp), ranks that are alone with an infinite element skip alone, and from then on
the ranks train different models.

Source: Micikevicius et al., "Mixed precision training", 2018.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.parallel.local import to_local


def not_finite(loss: Tensor, norms: Tensor) -> Tensor:
    """Whether the loss or a gradient is not finite on any rank. A collective over all ranks.

    Args:
        loss: this rank's, a scalar. norms: (gradients,), of this rank.

    Returns:
        1.0 or 0.0, the same on every rank: a scalar, float32, on the loss's device.
    """
    flag = 1 - (loss.isfinite() & norms.isfinite().all().to(loss.device)).to(torch.float32)
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that skips a step on all ranks of the run or on none, and so keeps the scales equal.

    Used as that one. Unscaling, which `step` does where `unscale_` was not called, is a collective over all ranks.

    Attributes:
        found_inf: 1.0 where the gradients that were unscaled last had an infinite element on any rank, else 0.0. None
            before that.
    """

    found_inf: Tensor | None = None

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the local gradients as the base class does, and agree over all ranks on what it has found."""
        local = [_local_pair(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        stand_in = SimpleNamespace(param_groups=[{"params": local}])
        by_device = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)  # type: ignore[misc, arg-type]
        # The gradients are on one device; this rank may have none, and another one some.
        agreed = next(iter(by_device.values()), found_inf)
        if dist.is_initialized():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        self.found_inf = agreed
        return by_device or {found_inf.device: found_inf}


def _local_pair(parameter: Tensor) -> Tensor:
    """The local tensor of a parameter, with that of its gradient."""
    local = to_local(parameter.detach())
    if parameter.grad is not None:
        local = local.detach()  # its gradient is set, and no other tensor's
        local.grad = to_local(parameter.grad)
    return local
