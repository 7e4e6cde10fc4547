"""Gradient clipping by the norm of the whole gradient, whatever the mesh.

Gradients may be plain, or cut over one axis, or over two, or replicated on some: each rank adds up the squares of what
it holds, each kind is summed over just the axes that cut it, and the kinds are put together.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, stages: DeviceMesh | None = None) -> Tensor:
    """Scale all gradients, in place, so that their 2-norm taken together is at most `max_norm`. A collective.

    Args:
        parameters: of the model, as given by its ``parameters()``; those without gradient are passed over.
        max_norm: above 0; ``math.inf`` scales nothing and gives the norm.
        stages: the pp axis, where other ranks hold other layers.

    Returns:
        The norm before scaling: a scalar, plain, float32 at least, the same on every rank.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: it must be above 0")
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(_kind(gradient), []).append(_local(gradient))
    total: Tensor | None = None
    for kind, parts in kinds.items():
        squares = _sum_of_squares(parts)
        if kind is not None:
            mesh, axes = kind
            for axis in axes:
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total = squares if total is None else total + squares.to(total.device)
    if total is None:
        total = torch.zeros(())
    if stages is not None:
        dist.all_reduce(total, group=stages.get_group())
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # a tensor: the host does not wait for the device
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(scale.to(local.dtype))
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _kind(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh of a gradient and the axes of it that cut the gradient; None if it is plain."""
    if not isinstance(gradient, DTensor):
        return None
    assert not any(placement.is_partial() for placement in gradient.placements), "backward leaves no partial sums"
    cutting = (i for i, cut in enumerate(gradient.placements) if not cut.is_replicate())
    return gradient.device_mesh, tuple(i for i in cutting if gradient.device_mesh.size(i) > 1)


def _sum_of_squares(parts: list[Tensor]) -> Tensor:
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(part, dtype=wide) for part in parts]).square().sum()
