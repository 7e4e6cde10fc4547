"""Sums over lanes in one fixed binary tree, so that their bits do not depend on who adds which terms.

Floating-point addition is not associative: ``(a + b) + c`` and ``a + (b + c)`` round differently. A tree fixes which
two terms are added first. Eight lanes have two natural trees; the number of a lane is written in binary::

    near: neighbours first                       far: the farthest first
    000 001 010 011 100 101 110 111              000 001 010 011 100 101 110 111
     └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘               000+100  001+101  010+110  011+111
       └───┬───┘       └───┬───┘                     │        │        │        │
           └───────┬───────┘                         └────────┼────────┘        │  …

A rank has consecutive lanes. Under the near tree it adds up its own lanes before it sends. Under the far tree the ranks
add up lane after lane, and each rank then adds up what it has of its lanes: so FSDP works, which sums the gradients of
each micro-batch over the ranks. Both trees give the same bits for any power of two of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

# A tensor, a NumPy array, or a list of tensors: `add` says how two are added.
Term = TypeVar("Term")


def sum_near(terms: Sequence[Term]) -> Term:
    """Add up a power of two of terms, neighbours first.

    Raises:
        ValueError: the number of terms is not a power of two.
    """
    left = _checked(terms)
    while len(left) > 1:
        left = [first + second for first, second in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def sum_far(terms: Sequence[Term]) -> Term:
    """Add up a power of two of terms, the farthest first: term i and term i + n/2, then i and i + n/4, and so on.

    Raises:
        ValueError: the number of terms is not a power of two.
    """
    left = _checked(terms)
    while len(left) > 1:
        half = len(left) // 2
        left = [first + second for first, second in zip(left[:half], left[half:], strict=True)]
    return left[0]


def _checked(terms: Sequence[Any]) -> list[Any]:
    """The terms as a list."""
    if not is_power_of_two(len(terms)):
        raise ValueError(f"{len(terms)} terms: a binary tree has a power of two")
    return list(terms)


def is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def visiting_order(lanes: int) -> list[int]:
    """The order in which a rank computes its lanes: their numbers with the bits reversed, such as 0, 2, 1, 3.

    In this order the far tree adds neighbours, so that `TreeSum` can begin before the last lane is computed.
    """
    order = [0]
    while len(order) < lanes:
        # The order of twice as many lanes: first the even numbers, then the odd ones.
        evens = [2 * lane for lane in order]
        order = evens + [lane + 1 for lane in evens]
    return order


class TreeSum(Generic[Term]):
    """Adds up terms that come one after the other, by the near tree. It keeps log2 of their number, and not all.

    Attributes:
        partial: sums of 1, 2, 4, … terms, the largest first: what a binary counter of the terms has as ones.
    """

    def __init__(self, add: Callable[[Term, Term], Term]) -> None:
        """
        Args:
            add: function that returns the sum of two terms. It may reuse the memory of the first.
        """
        self.partial: list[tuple[int, Term]] = []
        self._add = add

    def push(self, term: Term) -> None:
        """Add a term. Two sums of equally many terms become one."""
        size = 1
        while self.partial and self.partial[-1][0] == size:
            _, before = self.partial.pop()
            term = self._add(before, term)
            size *= 2
        self.partial.append((size, term))

    def pop(self) -> Term:
        """Return the sum of all terms, and begin anew.

        Raises:
            ValueError: the number of terms is not a power of two.
        """
        if len(self.partial) != 1:
            count = sum(size for size, _ in self.partial)
            raise ValueError(f"{count} terms: a binary tree has a power of two")
        ((_, total),) = self.partial
        self.partial = []
        return total
