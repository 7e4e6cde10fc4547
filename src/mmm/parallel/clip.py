"""Gradient clipping by the norm of the full gradient, on any mesh.

Gradients may be plain, or sharded over one axis or two, or replicated on some: each rank sums the squares of its local
tensors, and gradients that are sharded over the same axes are summed over just those.

``torch.nn.utils.get_total_norm`` is not used: it takes gradients of one mesh at a time, gives no norm of each (by which
a run names the one that is not finite), overflows in fp16, and would send from the host what offload keeps there.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.local import to_group_device, to_local
from mmm.torch_private.module import foreach_mul_, foreach_norm


@torch.no_grad()
def local_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of this rank's local tensor of each gradient: scalars, float32 at least."""
    norms: dict[int, Tensor] = {}
    tensors = [to_local(gradient) for gradient in gradients]
    for (_, dtype), alike in _by_kind(tensors).items():
        accum_dtype = torch.promote_types(dtype, torch.float32)
        norms.update(zip(alike, foreach_norm([tensors[index] for index in alike], 2, accum_dtype), strict=True))
    return [norms[index] for index in range(len(tensors))]


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """The places of the tensors of each device and dtype, which one kernel takes together."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    return kinds


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    stages: DeviceMesh | None = None,
    norms: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale all gradients, in place, so that their 2-norm taken together is at most `max_norm`. A collective.

    Args:
        parameters: of the model, as given by its ``parameters()``; those without gradient are skipped.
        max_norm: above 0; ``math.inf`` scales nothing and gives the norm.
        stages: the pp axis, whose ranks have other layers.
        norms: `local_norms` of the gradients, where they are known already.

    Returns:
        The norm before scaling: a scalar, plain, float32 at least, the same on every rank.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: it must be above 0")
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _sum_of_squares(gradients, local_norms(gradients) if norms is None else norms)
    if stages is not None:
        total = _summed(total, stages.get_group())
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # a tensor: the host does not wait for the device
    tensors = [to_local(gradient) for gradient in gradients]
    for (device, dtype), alike in _by_kind(tensors).items():
        foreach_mul_([tensors[index] for index in alike], scale.to(device, dtype))
    return norm


def _sum_of_squares(gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """Of the full gradients: the squares of local norms, summed over the axes that shard them. A collective."""
    by_sharding: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        by_sharding.setdefault(sharding_of(gradient), []).append(norm)
    totals: list[Tensor] = []
    for sharding, alike in by_sharding.items():
        squares = torch.stack(alike).square().sum()
        if sharding is not None:
            mesh, axes = sharding
            for axis in axes:
                squares = _summed(squares, mesh.get_group(axis))
        totals.append(squares)
    if not totals:
        return torch.zeros(())
    return sum((squares.to(totals[0].device) for squares in totals[1:]), totals[0])


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = to_group_device(value, group)
    dist.all_reduce(total, group=group)
    return total


def sharding_of(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh of a tensor and the axes that shard it; None if it is plain."""
    if not isinstance(tensor, DTensor):
        return None
    assert not any(placement.is_partial() for placement in tensor.placements), "backward leaves no partial sums"
    axes = (i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tensor.device_mesh, tuple(i for i in axes if tensor.device_mesh.size(i) > 1)
