"""How far a tensor is from what it should be."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable

import torch
from torch import Tensor

ROUNDING = 64  # roundings of the model's largest gradient: one that is no larger is 0
NOTHING = ROUNDING * torch.finfo(torch.float64).eps


def worst(differences: Iterable[float]) -> float:
    """The largest of some differences; NaN if one is. ``max(0.0, nan)`` is 0.0.

    Raises:
        ValueError: there is none: nothing was compared.
    """
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def size_of(tensor: Tensor) -> float:
    """The largest element's magnitude."""
    tensor = tensor.byte() if tensor.dtype == torch.bool else tensor  # bools have no abs
    return tensor.abs().max().item() if tensor.numel() else 0.0


def relative(tensor: Tensor, expected: Tensor, scale: float) -> float:
    """max|tensor - expected| / scale; of integers and bools, 0 where they are equal, else infinity. Infinities and NaN,
    as of a mask, are right where both have them."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(tensor, expected) else float("inf")
    value = tensor.to(expected.dtype)
    off = size_of((value - expected).masked_fill(_alike(value, expected), 0))
    return off / scale if scale else (0.0 if off == 0 else float("inf"))


def scale_of(gradient: Tensor, largest: float, nothing: float = NOTHING) -> float:
    """What a gradient's differences are measured by: its largest element; of one that is 0 but for rounding, the
    model's largest.

    Args:
        nothing: the size, relative to `largest`, up to which a gradient is rounding alone.
    """
    size = size_of(gradient)
    return size if size > nothing * largest else largest


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's elements as they are in memory, to look them up by."""
    own = tensor.contiguous()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())


def finite_size_of(tensor: Tensor) -> float:
    """The largest element's magnitude of those that are finite."""
    return size_of(tensor[torch.isfinite(tensor)])


def _alike(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors have the same, a NaN in both included."""
    return (one == other) | ((one != one) & (other != other))


def same_elements(one: Tensor, other: Tensor) -> bool:
    """As `torch.equal`, and a NaN is the same as a NaN."""
    return one.shape == other.shape and bool(_alike(one, other).all())


def fits_float32(tensor: Tensor) -> bool:
    """Whether float32 can have each of the elements, as it can of what was rounded to it."""
    return tensor.is_floating_point() and same_elements(tensor.float().to(tensor.dtype), tensor)
