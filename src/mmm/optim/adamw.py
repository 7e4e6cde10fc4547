"""Makes AdamW, which computes on this rank's shards, and SGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.local import to_local

# PyTorch's default betas.
BETAS = (0.9, 0.999)

# Optimizer → elements of its state for each parameter. Muon has at least that many.
STATE = {"adamw": 2, "muon": 1, "sgd": 0}

# Kinds of device for which PyTorch has AdamW as one kernel.
FUSED = {"cpu", "cuda", "xpu", "mps"}


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, which computes on this rank's shards of DTensors. Parameters, gradients and state stay DTensors.

    Given DTensors, PyTorch first finds out for each operation and each shape how the result is sharded: that takes a
    tenth of a second or more in the first step, and some milliseconds in each.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        *columns: list[Tensor],
    ) -> bool:
        # PyTorch appends the tensors of the group to these lists, and hands them to its kernel.
        has_complex: bool = super()._init_group(group, parameters, *columns)  # type: ignore[no-untyped-call]
        take_shards(parameters, columns)
        return has_complex


def take_shards(parameters: list[Tensor], columns: Iterable[list[Tensor]]) -> None:
    """Replace DTensors by this rank's shards, in place.

    Args:
        parameters: the parameters of a group.
        columns: lists with one tensor for each parameter: the gradients, and each kind of state. Some may be empty.
    """
    for tensors in columns:
        shards = []
        for tensor, parameter in zip(tensors, parameters, strict=False):
            shards.append(_shard_as(tensor, parameter))
        tensors[:] = shards
    parameters[:] = map(to_local, parameters)


def _shard_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharded as the parameter is."""
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return to_local(tensor)
    # A gradient may still be a partial sum.
    if tensor.placements != parameter.placements:
        tensor = tensor.redistribute(placements=parameter.placements)
    return to_local(tensor)


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float | None = None,
    decayed: str = "all",
    betas: tuple[float, float] | None = None,
    exact: bool = False,
) -> torch.optim.Optimizer:
    """Make an optimizer: ``adamw`` (with PyTorch's defaults) or ``sgd`` (without momentum).

    AdamW hides a gradient that is wrong by a factor, because it divides by the gradient's size; SGD shows it.

    Args:
        name: ``adamw`` or ``sgd``.
        parameters: the parameters to update.
        lr: learning rate.
        weight_decay: weight decay of AdamW; None: PyTorch's default.
        decayed: which parameters AdamW decays: ``all``, or ``matrices``, those of two dims or more.
        betas: decay rates of AdamW's two moments; None: PyTorch's default.
        exact: leave out AdamW's fused kernel, which rounds the last few elements of a shard otherwise than the rest.
    """
    groups = groups_of(parameters, weight_decay, decayed)
    if name == "sgd":
        # SGD would decay the weights by a group's `weight_decay`.
        undecayed = [{"params": group["params"]} for group in groups]
        return torch.optim.SGD(undecayed, lr=lr)
    one_kernel = None if exact else fused(groups)
    return AdamW(groups, lr=lr, betas=betas or BETAS, fused=one_kernel)


def groups_of(
    parameters: Iterable[nn.Parameter],
    weight_decay: float | None = None,
    decayed: str = "all",
) -> list[dict[str, Any]]:
    """Split parameters into groups of one mesh and one weight decay each. The arguments are those of `make_optimizer`.

    PyTorch updates the tensors of a group at once, and cannot do that with DTensors of several meshes.
    """
    alike: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decays = decayed == "all" or parameter.ndim > 1
        alike.setdefault((mesh, decays), []).append(parameter)
    rate = 0.01 if weight_decay is None else weight_decay
    groups = []
    for (_, decays), members in alike.items():
        groups.append({"params": members, "weight_decay": rate * decays})
    return groups


def fused(groups: Iterable[dict[str, Any]]) -> bool | None:
    """Whether one kernel can update these groups by AdamW; None lets PyTorch choose another way."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return kinds <= FUSED or None


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate that the record stores as ``lr``: the largest, if groups have several."""
    return max(float(group["lr"]) for group in optimizer.param_groups)
