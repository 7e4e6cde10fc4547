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
    """The item whose difference is largest. One that is NaN comes before all others, infinity included.

    Args:
        key: the difference of an item. Default: the item itself.

    Raises:
        ValueError: there is none: nothing was compared.
    """

    def order(item: T) -> tuple[bool, float]:
        difference = float(key(item))
        return (True, 0.0) if math.isnan(difference) else (False, difference)

    return max(items, key=order)


def relative_error(value: float, reference: float) -> float:
    """|value - reference| / |reference|; where the reference is 0, the difference itself."""
    difference = abs(value - reference)
    return difference / abs(reference) if reference else difference
