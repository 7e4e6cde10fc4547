"""Makes all ranks skip a step, or none: loss scaling for fp16, and losses or gradients that are not finite.

The largest number of fp16 is 65,504, and small gradients become 0. So the loss is scaled up, and the gradients are
scaled down again before the optimizer's step. If the scaling has made a gradient infinite, the step is skipped and the
scale halved. When a model is sharded over ranks, the infinite element may be on one rank only::

    rank        0         1         2         3
    gradients   finite    finite    inf       finite
                  └─────────┴────┬────┴─────────┘        all-reduce, maximum, over the whole run
    step        skipped   skipped   skipped   skipped

PyTorch's own scaler only asks, for DTensors, the ranks over which the *first* gradient is sharded. If that gradient is
replicated (a norm, a convolution under tp), a rank with an infinite element in another gradient skips the step by
itself, and from then on the ranks train different models.

Source: Micikevicius et al., "Mixed precision training", 2018.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.parallel.local import to_local


def not_finite(loss: Tensor, norms: Tensor) -> Tensor:
    """Tell whether the loss or a gradient is not finite on any rank. A collective over all ranks.

    Args:
        loss: this rank's loss, a scalar.
        norms: norms of this rank's gradients, (gradients,).

    Returns:
        1.0 if something is not finite, else 0.0, the same on every rank: a float32 scalar on the loss's device.
    """
    gradients_finite = norms.isfinite().all().to(loss.device)
    all_finite = loss.isfinite() & gradients_finite
    # As a number, on the device: the host does not wait for it here.
    flag = 1 - all_finite.to(torch.float32)
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that skips a step on all ranks of the run or on none, so that all scales stay equal.

    It is used like PyTorch's. Unscaling is a collective over all ranks; `step` does it if `unscale_` was not called.

    Attributes:
        found_inf: 1.0 if the gradients that were unscaled last had an infinite element on any rank, else 0.0; None
            before gradients were unscaled.
    """

    found_inf: Tensor | None = None

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale the local gradients as the base class does, and find out whether any rank has an infinite element.

        Returns:
            Device → 1.0 or 0.0, as the base class does.
        """
        # Given DTensors, the base class would communicate; given local tensors, it does not.
        local = []
        for group in optimizer.param_groups:
            local += [_local_pair(parameter) for parameter in group["params"]]
        stand_in = SimpleNamespace(param_groups=[{"params": local}])
        by_device = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)  # type: ignore[misc, arg-type]
        # All gradients are on one device. A rank without gradients takes part as well: another one may have some.
        agreed = next(iter(by_device.values()), found_inf)
        if dist.is_initialized():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        self.found_inf = agreed
        return by_device or {found_inf.device: found_inf}


def _local_pair(parameter: Tensor) -> Tensor:
    """The local tensor of a parameter, which has the local tensor of its gradient as ``grad``."""
    local = to_local(parameter.detach())
    if parameter.grad is not None:
        # A tensor of its own, so that no other tensor's gradient is set.
        local = local.detach()
        local.grad = to_local(parameter.grad)
    return local
