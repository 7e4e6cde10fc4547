"""Experts kept busy alike: after a step, the router's bias moves against the load.

Source: Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.nn.draw import accum_dtype
from mmm.nn.experts import MixtureOfExperts
from mmm.parallel.mesh import Mesh

BALANCE_RATE = 1e-3  # DeepSeek-V3's
TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # their ranks have different tokens


@torch.no_grad()
def balance_experts(
    model: nn.Module | Iterable[nn.Module], mesh: Mesh | DeviceMesh, rate: float | Tensor = BALANCE_RATE
) -> Tensor:
    """After a step of the optimizer: make experts that had more tokens than the mean less likely, and the others more.

    Each bias moves by ``rate · sign(mean load - load)``. Loads are integers, added up over micro-batches, dp_replicate,
    dp_shard, cp and tp, so that biases are the same, to the last bit, on every mesh. A collective, except where the
    model has no experts.

    Args:
        model: or this rank's pipeline stages.

    Returns:
        (layers, n_experts) int64 on the device: tokens per expert, over all ranks, of this rank's layers in the order
        of the model; (0, 0) where there are none.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, MixtureOfExperts)]
    if not layers:
        return torch.zeros(0, 0, dtype=torch.int64)
    none, mesh = torch.zeros_like(layers[0].expert_bias, dtype=torch.int64), Mesh.of(mesh)
    counted = (layer.tokens_per_expert for layer in layers)
    load = torch.stack([none if tokens is None else tokens for tokens in counted])  # (layers, n_experts)
    for axis in TOKEN_AXES:
        if getattr(mesh.layout, axis) > 1:
            dist.all_reduce(load, group=mesh[axis].get_group())
    direction = (load.sum(1, keepdim=True) - load.shape[1] * load).sign()  # in integers: exact
    for layer, sign in zip(layers, direction, strict=True):
        layer.expert_bias += rate * sign.to(layer.expert_bias.dtype)
        layer.tokens_per_expert = None
    return load


def imbalance(load: Tensor) -> Tensor:
    """The largest load over the mean load, of the layer where that is worst: 1 is even, n_experts / top_k the worst.

    Args:
        load: (layers, n_experts), of `balance_experts`.

    Returns:
        Scalar, on the device of `load`; NaN where no expert had a token.
    """
    wide = load.to(accum_dtype(load.device))
    return (wide.amax(1) / wide.mean(1)).max() if load.numel() else wide.new_tensor(math.nan)
