"""How far numbers are from what they should be. NaN is further off than any number.

``max(0.0, nan)`` is 0.0, and a reduction by MAX may drop a NaN too: what decides by them whether a result is right
passes one that is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def worst(items: Iterable[T], key: Callable[[T], Any] = lambda item: item) -> T:
    """The item whose difference is largest. NaN counts as larger than all others, infinity included.

    Args:
        items: what was compared.
        key: returns the difference of an item. Default: the item itself.

    Raises:
        ValueError: there are no items: nothing was compared.
    """

    def order(item: T) -> tuple[bool, float]:
        difference = float(key(item))
        # A comparison with NaN is always false, so NaN itself is not put in order.
        if math.isnan(difference):
            return (True, 0.0)
        return (False, difference)

    return max(items, key=order)


def relative_error(value: float, reference: float) -> float:
    """|value - reference| / |reference|; if the reference is 0, the difference itself."""
    difference = abs(value - reference)
    if reference == 0:
        return difference
    return difference / abs(reference)
