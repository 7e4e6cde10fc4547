"""LARS and LAMB: each tensor's step is in proportion to the tensor's size, so that large batches bear large rates.

::

    LARS    v ← μ v + γ · η |w| / (|g| + λ |w|) · (g + λ w)               w ← w - v
    LAMB    m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) g²           as in Adam, both without their bias:
            u = m̂ / (√v̂ + ε) + λ w                                        w ← w - γ · |w| / |u| · u

γ is the learning rate, λ the weight decay, |·| the 2-norm of the full tensor. A rank has a shard of it::

    rank 0          rank 1          rank 2          rank 3           of FSDP, HSDP, ZeRO, tp, ep
    [Σw² Σg²]ₙ      [Σw² Σg²]ₙ      [Σw² Σg²]ₙ      [Σw² Σg²]ₙ       of all n tensors
        └───────────────┴───────┬───────┴───────────────┘            one all-reduce for each axis that shards
    |w|, |g| of all n tensors, the same on every rank

Tensors of fewer than two dims (biases, norms) take the step without the ratio, as in the authors' programs. So does a
tensor that is 0, or whose update is 0. A stack of experts is one tensor. LAMB computes its update twice, for its norm
and for its step, and needs no memory in between.

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

# The weight decay of the papers' experiments: AlexNet's and BERT's.
WEIGHT_DECAY = {"lars": 5e-4, "lamb": 0.01}


class LayerwiseOptimizer(torch.optim.Optimizer):
    """The step that LARS and LAMB share. Every step is a collective of the ranks that shard a parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the gradients anew and returns the loss, as PyTorch's optimizers accept it.

        Returns:
            The loss that `closure` has returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = []
        for group in self.param_groups:
            updated += [(p, group) for p in group["params"] if p.grad is not None]
        for parameter, group in updated:
            self.accumulate(parameter, group)
        # Biases and norms have no ratio.
        adapted = [(p, group) for p, group in updated if p.ndim > 1]
        ratios = self.trust_ratios(adapted)
        for parameter, group in updated:
            self.update(parameter, ratios.get(id(parameter), 1.0), group)
        return loss

    def trust_ratios(self, adapted: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> dict[int, Tensor]:
        """Compute the trust ratios of parameters. A collective of the ranks that shard one of them.

        Args:
            adapted: parameters that have a ratio, each with its group.

        Returns:
            id of a parameter → its ratio, a scalar on the parameter's device.
        """
        if not adapted:
            return {}
        parameters = [parameter for parameter, _ in adapted]
        weights = local_norms(parameters)
        device = weights[0].device
        pairs = []
        for weight, (parameter, group) in zip(weights, adapted, strict=True):
            # One direction at a time: it is as large as the parameter.
            (direction,) = local_norms([self.direction(parameter, group)])
            pair = (weight.to(device), direction.to(device))
            pairs.append(torch.stack(pair))
        # (parameters, 2): the norms of the weight and of its direction
        norms = full_norms(parameters, torch.stack(pairs))
        ratios = {}
        for (parameter, group), (weight, direction) in zip(adapted, norms, strict=True):
            nonzero = (weight > 0) & (direction > 0)
            ratio = torch.where(nonzero, self.ratio(weight, direction, group), 1.0)
            ratios[id(parameter)] = ratio.to(parameter.device)
        return ratios

    def accumulate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Add the gradient to the optimizer's state of a parameter."""
        raise NotImplementedError

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Return the tensor whose norm the weight's norm is compared with: this rank's local tensor."""
        raise NotImplementedError

    def ratio(self, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the trust ratio, a scalar, from two norms of full tensors, scalars too."""
        raise NotImplementedError

    def update(
        self,
        parameter: nn.Parameter,
        ratio: Tensor | float,
        group: dict[str, Any],
    ) -> None:
        """Move a parameter by its step, in place."""
        raise NotImplementedError


class LARS(LayerwiseOptimizer):
    """SGD with momentum, whose rate for each tensor is in proportion to |w| / |g|. Its state is ``momentum_buffer``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        eta: float = 1e-3,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": 0.0,
            "momentum": momentum,
            "eta": eta,
        }
        super().__init__(groups, defaults)

    def accumulate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        return gradient_of(parameter)

    def ratio(self, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        ratio: Tensor = group["eta"] * weight / (direction + group["weight_decay"] * weight)
        return ratio

    def update(
        self,
        parameter: nn.Parameter,
        ratio: Tensor | float,
        group: dict[str, Any],
    ) -> None:
        local = to_local(parameter)
        momentum = to_local(self.state[parameter]["momentum_buffer"])
        rate = group["lr"] * ratio
        decayed = gradient_of(parameter) + group["weight_decay"] * local
        momentum.mul_(group["momentum"])
        momentum.add_(decayed * rate)
        local.sub_(momentum)


class LAMB(LayerwiseOptimizer):
    """AdamW, whose step for each tensor is as large as the tensor, times the rate.

    Its state is ``exp_avg``, ``exp_avg_sq`` and ``step``.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-6,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": 0.0,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(groups, defaults)

    def accumulate(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        gradient = gradient_of(parameter)
        if not state:
            state["step"] = torch.zeros((), device=gradient.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        to_local(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        second = to_local(state["exp_avg_sq"])
        second.mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)

    def direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        local = to_local(parameter)
        dtype = torch.promote_types(local.dtype, torch.float32)
        step = state["step"].to(dtype)
        # The bias corrections 1 - βᵗ, as -expm1(t log β): on the device, and without losing the digits that float32 has
        # no room for when βᵗ is close to 1.
        corrections = []
        for beta in group["betas"]:
            log_beta = math.log(beta) if beta else -math.inf
            corrections.append(-torch.expm1(step * log_beta))
        first = to_local(state["exp_avg"]) / corrections[0]
        second = to_local(state["exp_avg_sq"]) / corrections[1]
        adam = first / second.sqrt_().add_(group["eps"])
        return adam + group["weight_decay"] * local

    def ratio(self, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        return weight / direction

    def update(
        self,
        parameter: nn.Parameter,
        ratio: Tensor | float,
        group: dict[str, Any],
    ) -> None:
        rate = group["lr"] * ratio
        to_local(parameter).sub_(self.direction(parameter, group) * rate)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's local tensor of a parameter's gradient."""
    assert parameter.grad is not None
    return to_local(parameter.grad)


def full_norms(parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
    """Compute the 2-norms of full tensors from those of local tensors.

    A collective: one all-reduce, of all norms at once, for each axis that shards any of the parameters.

    Args:
        parameters: parameters that tell how the tensors are sharded.
        norms: norms of this rank's local tensors, (parameters, n): n tensors that are sharded as the parameter is.

    Returns:
        (parameters, n), the same on all ranks that share a tensor.
    """
    squares = norms.square()
    # Group → rows of `squares` whose parameters it shards.
    sharded_by: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        sharding = sharding_of(parameter)
        if sharding is not None:
            mesh, axes = sharding
            for axis in axes:
                sharded_by.setdefault(mesh.get_group(axis), []).append(index)
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
    """Make ``lars`` or ``lamb``. The arguments are those of `mmm.optim.adamw.make_optimizer`.

    Args:
        weight_decay: None: that of the paper.
        decayed: None: ``matrices``.
    """
    if weight_decay is None:
        weight_decay = WEIGHT_DECAY[name]
    groups = groups_of(parameters, weight_decay, decayed or "matrices")
    if name == "lars":
        return LARS(groups, lr)
    return LAMB(groups, lr, betas or BETAS)
