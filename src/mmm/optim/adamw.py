"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.local import to_local

BETAS = (0.9, 0.999)  # PyTorch's
FUSED = {"cpu", "cuda", "xpu", "mps"}  # where PyTorch has AdamW as one kernel


# PyTorch's optimizers that update each element by itself, in place. SGD is not among them: it keeps new tensors.
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)


def update_shards(optimizer: Any) -> None:
    """Lets one of PyTorch's optimizers compute on this rank's shards, where it updates each element by itself.

    Given DTensors, PyTorch first finds out for each operation and each shape how the result is sharded: seconds, in the
    first step of a small model. Parameters, gradients and state stay the DTensors that they are.
    """
    if type(optimizer) not in ELEMENTWISE or "_init_group" in vars(optimizer):
        return
    init_group = optimizer._init_group

    def init_group_locally(group: dict[str, Any], parameters: list[Tensor], *columns: list[Tensor]) -> Any:
        result = init_group(group, parameters, *columns)
        take_shards(parameters, columns)
        return result

    optimizer._init_group = init_group_locally


def take_shards(parameters: list[Tensor], columns: Iterable[list[Tensor]]) -> None:
    """Put this rank's shards in the place of DTensors.

    Args:
        columns: of each parameter its gradient, and each kind of state; some may be empty.
    """
    for tensors in columns:
        pairs = zip(tensors, parameters, strict=False)
        tensors[:] = [_shard_as(tensor, parameter) for tensor, parameter in pairs]
    parameters[:] = map(to_local, parameters)


def _shard_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor, of one that is sharded as the parameter is."""
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return to_local(tensor)
    if tensor.placements != parameter.placements:  # a gradient that is still a partial sum
        tensor = tensor.redistribute(placements=parameter.placements)
    return to_local(tensor)


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float | None = None,
    decayed: str = "all",
    betas: tuple[float, float] | None = None,
) -> torch.optim.Optimizer:
    """``adamw`` (PyTorch's defaults) or ``sgd`` (no momentum).

    AdamW hides a gradient that is wrong by a factor, because it divides by the gradient's size; SGD shows it.

    Args:
        weight_decay: of AdamW. None: PyTorch's. decayed: ``all``, or ``matrices``: what has two dims or more.
        betas: of AdamW. None: PyTorch's.
    """
    groups = groups_of(parameters, weight_decay, decayed)
    if name == "sgd":
        return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=lr)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas or BETAS, fused=fused(groups))
    update_shards(optimizer)
    return optimizer


def groups_of(
    parameters: Iterable[nn.Parameter], weight_decay: float | None = None, decayed: str = "all"
) -> list[dict[str, Any]]:
    """Parameters in groups of one mesh and one weight decay; arguments as of `make_optimizer`."""
    # A group a mesh: PyTorch updates the tensors of a group at once, and DTensors of several meshes it cannot.
    alike: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        alike.setdefault((mesh, decayed == "all" or parameter.ndim > 1), []).append(parameter)
    rate = 0.01 if weight_decay is None else weight_decay
    return [{"params": group, "weight_decay": rate * decays} for (_, decays), group in alike.items()]


def fused(groups: Iterable[dict[str, Any]]) -> bool | None:
    """Whether AdamW of these is one kernel; None for what PyTorch takes instead."""
    return {parameter.device.type for group in groups for parameter in group["params"]} <= FUSED or None


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that a row of the record has as ``lr``: where groups have several, the largest."""
    return max(float(group["lr"]) for group in optimizer.param_groups)
