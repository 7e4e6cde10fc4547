"""How far a tensor is from what it should be."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mmm_verify.dtypes import widest

# So many roundings of the model's largest gradient: a gradient that is not larger counts as 0.
ROUNDING = 64
NOTHING = ROUNDING * torch.finfo(torch.float64).eps


def worst(differences: Iterable[float]) -> float:
    """The largest of some differences; NaN if one of them is NaN.

    Raises:
        ValueError: there is none, so nothing was compared.
    """
    # max(0.0, nan) would be 0.0: a NaN has to count as the largest.
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def size_of(tensor: Tensor) -> float:
    """The largest magnitude of an element; 0 for an empty tensor."""
    if not tensor.numel():
        return 0.0
    # Bools have no abs.
    if tensor.dtype == torch.bool:
        tensor = tensor.byte()
    return tensor.abs().max().item()


def distance(tensor: Tensor, expected: Tensor, ignored: Tensor | None = None) -> float:
    """The largest distance between two elements at the same place, but for those in the mask `ignored`.

    An infinity or NaN, as in a mask, is right where both tensors have it.
    """
    # In float64, whatever the tensors are in: the difference itself must not round.
    right = widest(expected)
    value = tensor.to(right.dtype)
    off = (value - right).masked_fill(_alike(value, right), 0)
    if ignored is not None:
        off = off.masked_fill(ignored, 0)
    return size_of(off)


def relative(tensor: Tensor, expected: Tensor, scale: float) -> float:
    """Their `distance`, divided by `scale`. For integers and bools 0 if they are equal, else infinity.

    It is infinite for another shape, too.
    """
    if tensor.shape != expected.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        if torch.equal(tensor, expected):
            return 0.0
        return math.inf
    off = distance(tensor, expected)
    if scale:
        return off / scale
    # Everything should be 0: any difference is infinitely large, relative to that.
    if off == 0:
        return 0.0
    return math.inf


def relative_to_itself(tensor: Tensor, expected: Tensor) -> float:
    """How far a tensor is off, relative to the largest finite element that is expected."""
    return relative(tensor, expected, finite_size_of(expected))


def scale_of(gradient: Tensor, largest: float, nothing: float = NOTHING) -> float:
    """The size that a gradient's differences are divided by.

    That is its largest element. A gradient that is 0 but for rounding is measured by the model's largest gradient.

    Args:
        gradient: the full gradient, as on one device.
        largest: the size of the model's largest gradient.
        nothing: the size, relative to `largest`, up to which a gradient is only rounding.
    """
    size = size_of(gradient)
    if size > nothing * largest:
        return size
    return largest


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's elements as bytes, which can be the key of a dict."""
    own = tensor.contiguous()
    # Not through NumPy, which may not be installed.
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())


def index_of_rows(rows: Tensor) -> dict[bytes, int]:
    """A row's `bytes_of` → its index along dim 0. Equal rows have one index, that of the first of them."""
    index_of_row: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        index_of_row.setdefault(bytes_of(row), index)
    return index_of_row


def finite_size_of(tensor: Tensor) -> float:
    """The largest magnitude of the elements that are finite."""
    return size_of(tensor[torch.isfinite(tensor)])


def _alike(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors have the same element; a NaN in both counts as the same."""
    both_nan = (one != one) & (other != other)
    return (one == other) | both_nan


def same_elements(one: Tensor, other: Tensor) -> bool:
    """`torch.equal`, except that a NaN equals a NaN."""
    return one.shape == other.shape and bool(_alike(one, other).all())


def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a type can hold each of the elements exactly, as it can after rounding to it."""
    if not tensor.is_floating_point():
        return False
    rounded = tensor.to(dtype).to(tensor.dtype)
    return same_elements(rounded, tensor)
