"""How far rounding moves what a model computes. In low precision, this measurement limits every comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmm_verify.difference import distance, finite_size_of, size_of, worst
from mmm_verify.dtypes import widest
from mmm_verify.observe import LocalTensor, Observed

# How many times the model is run with its weights and inputs moved by one rounding.
DRAWS = 4
# A difference has to be so many times the measured noise to count. In 16 bits the margin is smaller: with more, a
# gradient that is half of what it should be would pass. docs/verify.md has the measurement.
MARGIN = 32
MARGIN_16_BITS = 4
# Relative: where the tolerance is larger, a gradient of half the right size might pass. That is off by 0.5, less the
# noise, which in 16 bits is a quarter of the tolerance: 0.5 - 0.4 / 4 = 0.4.
TOO_LOOSE = 0.4


@dataclass
class Noise:
    """How far rounding moves what one step of a model computes, relative to the largest element of each tensor.

    Attributes:
        loss: how far it moves the loss.
        norm: how far it moves the norms that the step clips by.
        gradients: parameter → how far it moves the gradient.
        weights: parameter or buffer → how far it moves the value after the step.
        unresolved: parameters whose gradient is so small or inexact that a wrong factor would not be seen in it. Their
            noise is relative to the model's largest gradient.
    """

    loss: float = 0.0
    norm: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    unresolved: set[str] = field(default_factory=set)


def moved_by_rounding(tensor: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """A tensor with each element moved by one rounding, up or down at random. Integers and bools stay.

    Args:
        tensor: the tensor.
        eps: the distance from 1 to the next number, in the type that is rounded to. In float64, which cannot hold
            half of it next to 1, twice that.
        generator: draws the directions.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    coins = torch.randint(2, tensor.shape, generator=generator)
    # 0 and 1 → -1 and 1. In float64: in float32, 1 plus half of its own distance would be 1.
    signs = (2 * coins - 1).double()
    # Half of the distance rounds to the next number, for nearly every number.
    moved = widest(tensor) * (1 + signs * (eps / 2))
    return moved.to(tensor.dtype)


def gradient_noise(
    expected: Observed, draws: Sequence[Observed], rounding: float, margin: float
) -> tuple[dict[str, float], set[str]]:
    """How far the gradients of draws are from those of the model, before and after clipping.

    Returns:
        The noise by parameter, and the parameters that are unresolved; see `Noise`.
    """
    largest = largest_gradient(expected)
    noise: dict[str, float] = {}
    unresolved: set[str] = set()
    for name, gradient in expected.gradients.items():
        unclipped = expected.before_clipping(name)
        if gradient is None or unclipped is None:
            continue
        # Relative to this gradient's largest element, and to that of all gradients.
        by_own_size = [rounding]
        by_largest = [rounding]
        for draw in draws:
            pairs = (
                (draw.gradients.get(name), gradient),
                (draw.before_clipping(name), unclipped),
            )
            for other, own in pairs:
                values = torch.zeros_like(own.local)
                # A draw may have no gradient: then all of it is noise.
                if other is not None:
                    values = other.local
                off = distance(values, own.local)
                if largest:
                    by_largest.append(off / largest)
                size = size_of(own.local)
                if size:
                    by_own_size.append(off / size)
        own_noise = worst(by_own_size)
        # A gradient of exactly 0 is not resolved either.
        is_zero = size_of(gradient.local) == 0
        if margin * own_noise <= TOO_LOOSE and not is_zero:
            noise[name] = own_noise
        else:
            unresolved.add(name)
            noise[name] = worst(by_largest)
    return noise, unresolved


def largest_gradient(observed: Observed) -> float:
    """The largest magnitude of an element of any gradient, before clipping; 0 if there is no gradient."""
    return largest_element(observed.before_clipping(name) for name in observed.gradients)


def largest_element(tensors: Iterable[LocalTensor | None]) -> float:
    """The largest magnitude of an element of any of the tensors; 0 if there is none."""
    sizes = [0.0]
    for tensor in tensors:
        if tensor is not None:
            sizes.append(size_of(tensor.local))
    return worst(sizes)


def loss_noise(expected: Observed, draws: Sequence[Observed]) -> float:
    """How far the losses of draws are from the model's, relative."""
    own = expected.loss
    offs = [0.0]
    for draw in draws:
        if draw.loss is None or own is None:
            continue
        size = size_of(own.local)
        if size:
            offs.append(distance(draw.loss.local, own.local) / size)
    return worst(offs)


def norm_noise(expected: Observed, draws: Sequence[Observed]) -> float:
    """How far the norms that draws clip by are from the model's, relative."""
    offs = [0.0]
    for draw in draws:
        for norm, own in zip(draw.norms, expected.norms, strict=False):
            size = size_of(own.local)
            if size:
                offs.append(distance(norm.local, own.local) / size)
    return worst(offs)


def weight_noise(
    expected: Observed,
    draws: Sequence[Observed],
    shifts: Sequence[Mapping[str, Tensor]],
    masks: Mapping[str, Tensor | None],
    rounding: float,
) -> dict[str, float]:
    """How far the weights and buffers after a step of draws are from the model's, relative.

    Args:
        expected: the model's step.
        draws: the same step of each draw.
        shifts: for each draw, by how much its weights were moved before the first step. That is not counted.
        masks: by parameter, which elements are not compared after the step.
        rounding: the least noise.
    """
    noise = {}
    for name, full in expected.after.items():
        size = finite_size_of(full.local)
        offs = [rounding]
        # Integers, such as a batch norm's count of batches, have no rounding.
        comparable = size > 0 and full.local.is_floating_point()
        for draw, shift in zip(draws, shifts, strict=True):
            other = draw.after.get(name)
            if other is None or not comparable:
                continue
            own = widest(other.local)
            if name in shift:
                own = own - shift[name]
            off = distance(own, full.local, masks.get(name))
            offs.append(off / size)
        noise[name] = worst(offs)
    return noise


def output_noise(expected: Observed, draws: Sequence[Observed], rounding: float) -> dict[str, float]:
    """By module, how far the outputs of draws are from the model's, relative to the largest element of each output."""
    noise: dict[str, float] = {}
    for name, calls in expected.outputs.items():
        own = _tensors_of(calls)
        offs = [rounding]
        for draw in draws:
            others = _tensors_of(draw.outputs.get(name, []))
            for tensor, other in zip(own, others, strict=False):
                if not tensor.is_floating_point() or tensor.shape != other.shape:
                    continue
                size = finite_size_of(tensor)
                if size:
                    offs.append(distance(other, tensor) / size)
        noise[name] = worst(offs)
    return noise


def _tensors_of(calls: Sequence[Sequence[LocalTensor]]) -> list[Tensor]:
    """The tensors that a module returned, of all its calls."""
    tensors = []
    for call in calls:
        tensors += [output.local for output in call]
    return tensors
