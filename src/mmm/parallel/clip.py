"""Gradient clipping by the norm of the full gradient, on any mesh.

Gradients may be plain, sharded over one axis or two, or replicated on some. Each rank sums the squares of its local
tensors; gradients that are sharded over the same axes are then summed over these axes only.

``torch.nn.utils.get_total_norm`` is not used. It takes gradients of one mesh at a time, does not return the norm of
each (by which a run names the one that is not finite), overflows in fp16, and would send gradients from the host, where
offload keeps them.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.parallel.local import to_group_device, to_local
from mmm.torch_private.module import foreach_mul_, foreach_norm

# Tensors that one kernel takes together.
Kind = tuple[torch.device, torch.dtype]
# A mesh, and the indices of its axes that shard a tensor.
Sharding = tuple[DeviceMesh, tuple[int, ...]]


@torch.no_grad()
def local_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of this rank's local tensor of each gradient: scalars, float32 at least."""
    tensors = [to_local(gradient) for gradient in gradients]
    # By index in `gradients`.
    norms: dict[int, Tensor] = {}
    for (_device, dtype), indices in _by_kind(tensors).items():
        # bf16 has 8 bits of significand: too few to add up squares.
        accum_dtype = torch.promote_types(dtype, torch.float32)
        kind_tensors = [tensors[index] for index in indices]
        kind_norms = foreach_norm(kind_tensors, 2, accum_dtype)
        for index, norm in zip(indices, kind_norms, strict=True):
            norms[index] = norm
    return [norms[index] for index in range(len(tensors))]


def _by_kind(tensors: Sequence[Tensor]) -> dict[Kind, list[int]]:
    """Return the indices of the tensors of each device and dtype."""
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        kind = (tensor.device, tensor.dtype)
        by_kind[kind].append(index)
    return by_kind


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    stages: DeviceMesh | None = None,
    norms: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale all gradients, in place, so that their 2-norm taken together is at most `max_norm`. A collective.

    Args:
        parameters: those of the model, as its ``parameters()`` returns them. Those without a gradient are skipped.
        max_norm: above 0; ``math.inf`` scales nothing, and the norm is still returned.
        stages: the pp axis, whose ranks have other layers.
        norms: `local_norms` of the gradients, where they are known already.

    Returns:
        The norm before scaling: a plain scalar, float32 at least, the same on every rank.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: it must be above 0")
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    if norms is None:
        norms = local_norms(gradients)
    total = _sum_of_squares(gradients, norms)
    if stages is not None:
        total = _summed(total, stages.get_group())
    norm = total.sqrt()
    scale_gradients(gradients, max_norm, norm)
    return norm


@torch.no_grad()
def scale_gradients(
    gradients: Sequence[Tensor],
    max_norm: float,
    norm: Tensor,
) -> None:
    """Scale gradients, in place, whose 2-norm taken together is `norm`, so that it is at most `max_norm`."""
    # The scale stays a tensor: the host does not wait for the device.
    # 1e-6, as PyTorch has it, so that a norm of 0 divides nothing by 0.
    scale = max_norm / (norm + 1e-6)
    scale = scale.clamp(max=1.0)
    tensors = [to_local(gradient) for gradient in gradients]
    for (device, dtype), indices in _by_kind(tensors).items():
        kind_tensors = [tensors[index] for index in indices]
        kind_scale = scale.to(device, dtype)
        foreach_mul_(kind_tensors, kind_scale)


def _sum_of_squares(gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """The sum of squares of the full gradients: squares of local norms, summed over the axes that shard them.

    A collective of the ranks of these axes. All ranks see the same shardings in the same order.
    """
    # One collective for all gradients of a sharding.
    by_sharding: dict[Sharding | None, list[Tensor]] = defaultdict(list)
    for gradient, norm in zip(gradients, norms, strict=True):
        sharding = sharding_of(gradient)
        by_sharding[sharding].append(norm)
    totals: list[Tensor] = []
    for sharding, sharding_norms in by_sharding.items():
        local_squares = torch.stack(sharding_norms).square()
        squares = local_squares.sum()
        # What is replicated on an axis is the same on its ranks, and must not be summed over them.
        if sharding is not None:
            mesh, axes = sharding
            for axis in axes:
                squares = _summed(squares, mesh.get_group(axis))
        totals.append(squares)
    if not totals:
        return torch.zeros(())
    total, *others = totals
    for squares in others:
        total = total + squares.to(total.device)
    return total


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `value` summed over the ranks of a group. A collective of these."""
    total = to_group_device(value, group)
    dist.all_reduce(total, group=group)
    return total


def sharding_of(tensor: Tensor) -> Sharding | None:
    """Return the mesh of a tensor, and the indices of the axes that shard it; None if it is plain."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    axes = []
    for axis, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "backward leaves no partial sums"
        is_shared = mesh.size(axis) > 1
        if is_shared and not placement.is_replicate():
            axes.append(axis)
    return mesh, tuple(axes)
