"""Recognizes samples: did one rank and all ranks together see the same global batch?

A sample is known by its integers, exactly, and by a few random projections of its floats, which another batch size may
round differently.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of
from mmm_verify.torch_private import tensors_in

# How many projections stand for the floats of a tensor.
PROJECTIONS = 4
# Relative: how far the projections of one sample may be off in two runs.
NEAR = 1e-5


@dataclass(frozen=True, eq=False)
class Sample:
    """What is kept of a sample.

    Attributes:
        digest: a hash of its shapes and of all that is not a float.
        floats: for each of its tensors of floats, projections of it: (tensors, PROJECTIONS), in float64.
        inputs: its first tensor, without the dim of the samples; None if it is not needed to find parts of samples.
    """

    digest: str
    floats: Tensor
    inputs: Tensor | None

    def is_like(self, other: Sample) -> bool:
        """Whether the two are one sample: the same shapes and integers, and floats that are off by rounding at most."""
        if self.digest != other.digest:
            return False
        distances = (self.floats - other.floats).abs()
        sizes = torch.maximum(self.floats.abs(), other.floats.abs())
        # (tensors, 1): one projection may be near 0 by chance, the largest is not.
        scales = sizes.amax(1, keepdim=True)
        return bool((distances <= NEAR * scales).all())


@torch.no_grad()
def samples_in(inputs: Any, known: Container[str] | None = None) -> list[Sample]:
    """The samples along dim 0 of the tensors that a module is called with.

    Tensors with another dim 0 than the first one, such as a mask that all samples share, are left out. So is what was
    computed from weights.

    Args:
        inputs: positional and keyword arguments.
        known: digests of the samples of which no input is kept. None keeps no input of any.
    """
    tensors = []
    for tensor in tensors_in(inputs):
        # A scalar has no samples, and a sparse tensor no rows to take them from.
        has_rows = tensor.ndim > 0 and tensor.layout == torch.strided
        if has_rows and not tensor.requires_grad:
            tensors.append(tensor.detach().cpu())
    if not tensors:
        return []
    # Inputs come before masks and positions.
    n_samples = tensors[0].shape[0]
    batched = [tensor for tensor in tensors if tensor.shape[0] == n_samples]
    samples = []
    for index in range(n_samples):
        rows = [tensor[index] for tensor in batched]
        samples.append(_sample(rows, known))
    return samples


def _sample(tensors: Sequence[Tensor], known: Container[str] | None) -> Sample:
    """What is kept of a sample that consists of these tensors."""
    digest = hashlib.sha256()
    # Without floats, the sample has a tensor of (0, PROJECTIONS).
    projections = [torch.empty(0, PROJECTIONS, dtype=torch.float64)]
    for tensor in tensors:
        shape = tuple(tensor.shape)
        digest.update(repr(shape).encode())
        if tensor.is_floating_point():
            # A mask may have infinities.
            flat = tensor.double().flatten().nan_to_num(0.0, 1.0, -1.0)
            projected = _directions(flat.numel()) @ flat
            # (1, PROJECTIONS)
            projections.append(projected[None])
        else:
            digest.update(bytes_of(tensor))
    name = digest.hexdigest()
    inputs = None
    if known is not None and name not in known:
        # The script may write into its own tensor.
        inputs = tensors[0].clone()
    return Sample(name, torch.cat(projections), inputs)


@cache
def _directions(length: int) -> Tensor:
    """Random directions to project on, the same in every process: (PROJECTIONS, length)."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(PROJECTIONS, length, generator=generator, dtype=torch.float64)


def count_common(some: Sequence[Sample], others: Sequence[Sample]) -> int:
    """How many samples of two lists can be paired, each with one that is the same."""
    # By digest: a sample is compared only with those that may be the same.
    unpaired = defaultdict(list)
    for sample in others:
        unpaired[sample.digest].append(sample)
    count = 0
    for sample in some:
        candidates = unpaired[sample.digest]
        for other in candidates:
            if sample.is_like(other):
                candidates.remove(other)
                count += 1
                break
    return count


def are_same(some: Sequence[Sample], others: Sequence[Sample]) -> bool:
    """Whether two lists have the same samples, in any order."""
    return len(some) == len(others) == count_common(some, others)
