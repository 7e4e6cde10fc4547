"""Gradient clipping by the norm of the full gradient, on any mesh.

Gradients may be plain, or sharded over one axis or two, or replicated on some: each rank sums the squares of its local
tensors, and gradients that are sharded over the same axes are summed over just those.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.local import sendable, to_local


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, stages: DeviceMesh | None = None) -> Tensor:
    """Scale all gradients, in place, so that their 2-norm taken together is at most `max_norm`. A collective.

    Args:
        parameters: of the model, as given by its ``parameters()``; those without gradient are skipped.
        max_norm: above 0; ``math.inf`` scales nothing and gives the norm.
        stages: the pp axis, whose ranks have other layers.

    Returns:
        The norm before scaling: a scalar, plain, float32 at least, the same on every rank.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: it must be above 0")
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_sharding: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        by_sharding.setdefault(_sharding(gradient), []).append(to_local(gradient))
    total: Tensor | None = None
    for sharding, tensors in by_sharding.items():
        squares = _sum_of_squares(tensors)
        if sharding is not None:
            mesh, axes = sharding
            for axis in axes:
                squares = sendable(squares, mesh.get_group(axis))
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total = squares if total is None else total + squares.to(total.device)
    if total is None:
        total = torch.zeros(())
    if stages is not None:
        total = sendable(total, stages.get_group())
        dist.all_reduce(total, group=stages.get_group())
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # a tensor: the host does not wait for the device
    together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensors in by_sharding.values():
        for local in tensors:
            together.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), tensors in together.items():
        torch._foreach_mul_(tensors, scale.to(device, dtype))
    return norm


def _sharding(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh of a gradient and the axes that shard it; None if it is plain."""
    if not isinstance(gradient, DTensor):
        return None
    assert not any(placement.is_partial() for placement in gradient.placements), "backward leaves no partial sums"
    axes = (i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.device_mesh, tuple(i for i in axes if gradient.device_mesh.size(i) > 1)


def _sum_of_squares(parts: list[Tensor]) -> Tensor:
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(parts, 2, wide)).square().sum()
