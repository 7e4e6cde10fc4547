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

Optimizers whose step is one kernel (``fused``) read on the device whether to skip; plain SGD gets gradients of 0. With
others the host waits for it.

Source: Micikevicius et al., "Mixed precision training", 2018.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.parallel.local import to_local
from mmm.torch_private.module import found_inf_of, steps_unless_found_inf, unscale_and_check_


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
    """

    def __init__(self, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)
        self._agreed: Tensor | None = None

    def unless_skipped(self, rate: float) -> float | Tensor:
        """`rate`, or 0 where the last step was skipped: the same on every rank, and on the device."""
        return rate if self._agreed is None else (1 - self._agreed) * rate

    def step_unless(self, skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """`step`, also of a scaler that is not enabled; not done where `skip`, of `not_finite`, is 1."""
        self._agreed = skip
        if self.is_enabled():  # what `unscale_` has found is part of it
            for found_inf in found_inf_of(self, optimizer).values():
                found_inf.copy_(skip)
            self.step(optimizer)
        elif steps_unless_found_inf(optimizer):
            device = optimizer.param_groups[0]["params"][0].device  # with offload the host
            optimizer.grad_scale, optimizer.found_inf = None, skip.to(device)  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif _unmoved_by_zeros(optimizer):
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                local = to_local(parameter.grad)
                local.masked_fill_(skip.to(local.device, torch.bool), 0.0)
            optimizer.step()
        elif not skip.item():
            optimizer.step()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the local gradients, and agree over all ranks on whether any is infinite or NaN.

        `unscale_`, `step` and fused optimizers all call this (FSDP1's scaler replaces it as well).

        Returns:
            As the base class expects: device → 1.0 or 0.0, on each of the gradients' devices the same.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            local = to_local(parameter.grad)
            if local.dtype == torch.float16 and not allow_fp16:
                raise ValueError("gradients in fp16 cannot be unscaled: keep the weights in float32")
            kinds.setdefault((local.device, local.dtype), []).append(local)
        # With offload gradients lie on the host: each device has a flag of its own, and then all have the same.
        flags = {device: found_inf.to(device, copy=True) for device in {found_inf.device, *(d for d, _ in kinds)}}
        for (device, _), gradients in kinds.items():
            unscale_and_check_(gradients, flags[device], inv_scale.to(device))
        agreed = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).amax(0)
        if dist.is_initialized():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        for flag in flags.values():
            flag.copy_(agreed)
        self._agreed = agreed
        return flags


def _unmoved_by_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients of 0 change nothing."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )
