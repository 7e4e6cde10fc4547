"""Keeps all experts equally busy: after a step, the router's bias moves against the load.

Source: Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.nn.experts import MixtureOfExperts
from mmm.nn.init import accum_dtype
from mmm.parallel.mesh import Mesh

# The rate of DeepSeek-V3.
BALANCE_RATE = 1e-3
# Axes whose ranks have different tokens.
TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@torch.no_grad()
def balance_experts(
    model: nn.Module | Iterable[nn.Module],
    mesh: Mesh | DeviceMesh,
    rate: float | Tensor = BALANCE_RATE,
) -> Tensor:
    """Make experts that had more tokens than the mean less likely, and the others more. For after an optimizer's step.

    Each bias moves by ``rate · sign(mean load - load)``. Loads are integers, added up over micro-batches, dp_replicate,
    dp_shard, cp and tp, so that biases are the same, to the last bit, on every mesh. Routers with a softmax have no
    bias: their loads are only counted. A collective of all ranks of these axes, except where the model has no experts.

    Args:
        model: the model, or this rank's pipeline stages.
        mesh: the mesh that the model lies on.
        rate: how far a bias moves in a step.

    Returns:
        (layers, n_experts) int64 on the device: tokens per expert, over all ranks, for this rank's layers in the order
        of the model; (0, 0) where there are none.
    """
    if isinstance(model, nn.Module):
        model = [model]
    layers = []
    for stage in model:
        layers += [module for module in stage.modules() if isinstance(module, MixtureOfExperts)]
    if not layers:
        return torch.zeros(0, 0, dtype=torch.int64)
    mesh = Mesh.of(mesh)
    no_tokens = torch.zeros_like(layers[0].expert_bias, dtype=torch.int64)
    counts = []
    for layer in layers:
        count = layer.tokens_per_expert
        # None where no backward of this layer has run.
        counts.append(no_tokens if count is None else count)
    # (layers, n_experts): one all-reduce an axis for all layers.
    load = torch.stack(counts)
    for axis in TOKEN_AXES:
        if getattr(mesh.layout, axis) > 1:
            dist.all_reduce(load, group=mesh[axis].get_group())
    # mean - load, times n_experts: in integers, and so exact.
    total = load.sum(1, keepdim=True)
    n_experts = load.shape[1]
    direction = (total - n_experts * load).sign()
    for layer, sign in zip(layers, direction, strict=True):
        layer.move_bias(rate, sign)
    return load


def imbalance(load: Tensor) -> Tensor:
    """The largest load divided by the mean load, in the layer where this is worst.

    1 is even; n_experts / top_k is the worst possible.

    Args:
        load: (layers, n_experts), from `balance_experts`.

    Returns:
        Scalar, on the device of `load`; NaN where no expert had a token.
    """
    wide = load.to(accum_dtype(load.device))
    if load.numel() == 0:
        return wide.new_tensor(math.nan)
    by_layer = wide.amax(1) / wide.mean(1)
    return by_layer.max()
