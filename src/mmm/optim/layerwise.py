"""LARS and LAMB: each tensor's step in proportion to that tensor's size, so that large batches bear large rates.

::

    LARS    v ← μ v + γ · η |w| / (|g| + λ |w|) · (g + λ w)               w ← w - v
    LAMB    m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) g²           as Adam, both without their bias:
            u = m̂ / (√v̂ + ε) + λ w                                        w ← w - γ · |w| / |u| · u

γ: learning rate, λ: weight decay, |·|: the 2-norm of the full tensor. A rank has a shard of it::

    rank 0          rank 1          rank 2          rank 3           of FSDP, HSDP, ZeRO, tp, ep
    [Σw² Σg²]ₙ      [Σw² Σg²]ₙ      [Σw² Σg²]ₙ      [Σw² Σg²]ₙ       of all n tensors
        └───────────────┴───────┬───────┴───────────────┘            one all-reduce for each axis that shards
    |w|, |g| of all n tensors, the same on every rank

What has fewer than two dims (biases, norms) takes the step without the ratio, as the authors' programs have it; so does
a tensor that is 0, or whose update is. A stack of experts is one tensor. LAMB's update is computed twice, for its norm
and for its step, and takes no memory in between.

Sources: You et al., "Large batch training of convolutional networks", 2017 (LARS, algorithm 1); You et al., "Large
batch optimization for deep learning: training BERT in 76 minutes", 2020 (LAMB, algorithm 2, with φ(z) = z).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmm.optim.adamw import BETAS, groups_of
from mmm.parallel.clip import local_norms, sharding_of
from mmm.parallel.local import to_group_device, to_local

WEIGHT_DECAY = {"lars": 5e-4, "lamb": 0.01}  # of the papers: AlexNet's; BERT's


class LayerwiseOptimizer(torch.optim.Optimizer):
    """What both have in common. Every step is a collective of the ranks that shard a parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. closure: computes gradients anew and returns the loss, as PyTorch's optimizers take it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, group in updated:
            self.accumulate(parameter, group)
        adapted = [(p, group) for p, group in updated if p.ndim > 1]
        ratios = self.trust_ratios(adapted)
        for parameter, group in updated:
            self.update(parameter, ratios.get(id(parameter), 1.0), group)
        return loss

    def trust_ratios(self, adapted: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> dict[int, Tensor]:
        """The trust ratio of each parameter of those that have one, by its id: scalars. A collective."""
        if not adapted:
            return {}
        parameters = [parameter for parameter, _ in adapted]
        weights = local_norms(parameters)
        directions = [local_norms([self.direction(parameter, group)])[0] for parameter, group in adapted]
        device = weights[0].device
        pairs = [torch.stack((w.to(device), d.to(device))) for w, d in zip(weights, directions, strict=True)]
        norms = full_norms(parameters, torch.stack(pairs))
        ratios = {}
        for (parameter, group), (weight, direction) in zip(adapted, norms, strict=True):
            nonzero = (weight > 0) & (direction > 0)
            ratios[id(parameter)] = torch.where(nonzero, self.ratio(weight, direction, group), 1.0).to(parameter.device)
        return ratios

    def accumulate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Add the gradient to what the optimizer keeps of them."""
        raise NotImplementedError

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """What the weight's norm is held against: this rank's local tensor."""
        raise NotImplementedError

    def ratio(self, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        """The trust ratio of two norms of full tensors, scalars."""
        raise NotImplementedError

    def update(self, parameter: nn.Parameter, ratio: Tensor | float, group: dict[str, Any]) -> None:
        """Move a parameter, in place."""
        raise NotImplementedError


class LARS(LayerwiseOptimizer):
    """SGD with momentum; of each tensor the rate in proportion to |w| / |g|. State: ``momentum_buffer``."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.9, eta: float = 1e-3) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "momentum": momentum, "eta": eta})

    def accumulate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        return gradient_of(parameter)

    def ratio(self, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        ratio: Tensor = group["eta"] * weight / (direction + group["weight_decay"] * weight)
        return ratio

    def update(self, parameter: nn.Parameter, ratio: Tensor | float, group: dict[str, Any]) -> None:
        local, momentum = to_local(parameter), to_local(self.state[parameter]["momentum_buffer"])
        rate = group["lr"] * ratio
        momentum.mul_(group["momentum"]).add_((gradient_of(parameter) + group["weight_decay"] * local) * rate)
        local.sub_(momentum)


class LAMB(LayerwiseOptimizer):
    """AdamW, whose step of each tensor is as large as the tensor, times the rate. State: ``exp_avg``, ``exp_avg_sq``,
    ``step``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": betas, "eps": eps})

    def accumulate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], gradient_of(parameter)
        if not state:
            state["step"] = torch.zeros((), device=gradient.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        to_local(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        to_local(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        state, local = self.state[parameter], to_local(parameter)
        step = state["step"].to(torch.promote_types(local.dtype, torch.float32))
        # 1 - βᵗ, on the device, without the digits that float32 loses where βᵗ is close to 1
        first, second = (-torch.expm1(step * (math.log(beta) if beta else -math.inf)) for beta in group["betas"])
        root = (to_local(state["exp_avg_sq"]) / second).sqrt_()
        return to_local(state["exp_avg"]) / first / root.add_(group["eps"]) + group["weight_decay"] * local

    def ratio(self, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        return weight / direction

    def update(self, parameter: nn.Parameter, ratio: Tensor | float, group: dict[str, Any]) -> None:
        to_local(parameter).sub_(self.direction(parameter, group) * (group["lr"] * ratio))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """This rank's local tensor of a gradient that is there."""
    assert parameter.grad is not None
    return to_local(parameter.grad)


def full_norms(parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
    """The 2-norms of full tensors. A collective: one all-reduce for each axis that shards any of them, of all at once.

    Args:
        norms: (parameters, n), of the local tensors of n tensors that are sharded as the parameter is.

    Returns:
        (parameters, n), the same on all ranks that share a tensor.
    """
    squares = norms.square()
    sharded_by: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if (axes := sharding_of(parameter)) is not None:
            for axis in axes[1]:
                sharded_by.setdefault(axes[0].get_group(axis), []).append(index)
    for group, indices in sharded_by.items():
        total = to_group_device(squares[indices], group)
        dist.all_reduce(total, group=group)
        squares[indices] = total.to(squares.device)
    return squares.sqrt()


def make_layerwise(
    name: str,
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float | None = None,
    decayed: str | None = None,
    betas: tuple[float, float] | None = None,
) -> LayerwiseOptimizer:
    """``lars`` or ``lamb``; arguments as of `mmm.optim.adamw.make_optimizer`. decayed: None: ``matrices``."""
    rate = WEIGHT_DECAY[name] if weight_decay is None else weight_decay
    groups = groups_of(parameters, rate, decayed or "matrices")
    return LARS(groups, lr) if name == "lars" else LAMB(groups, lr, betas or BETAS)
