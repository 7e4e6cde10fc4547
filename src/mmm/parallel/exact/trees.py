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

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

# A number, a tensor, or a NumPy array.
Term = TypeVar("Term")


def sum_near(terms: Sequence[Term]) -> Term:
    """Add up a power of two of terms, neighbours first."""
    sums: list[Any] = list(terms)
    while len(sums) > 1:
        evens = sums[::2]
        odds = sums[1::2]
        sums = [first + second for first, second in zip(evens, odds, strict=True)]
    return sums[0]


def sum_far(terms: Sequence[Term]) -> Term:
    """Add up a power of two of terms, the farthest first: term i and term i + n/2, then i and i + n/4, and so on."""
    sums: list[Any] = list(terms)
    while len(sums) > 1:
        half = len(sums) // 2
        head = sums[:half]
        tail = sums[half:]
        sums = [first + second for first, second in zip(head, tail, strict=True)]
    return sums[0]


def add_up(losses: Sequence[Tensor], exact: bool) -> Tensor:
    """Add up a rank's losses of the micro-batches of a step, in the order in which they were computed.

    Args:
        exact: whether the micro-batches are lanes. In the order in which a rank computes them, the far tree adds
            neighbours.
    """
    if exact:
        return sum_far(losses)
    return sum(losses[1:], losses[0])


def visiting_order(lanes: int) -> list[int]:
    """Return the order in which a rank computes its lanes: their numbers with the bits reversed, such as 0, 2, 1, 3.

    In this order the far tree adds neighbours, so that sums can begin before the last lane is computed.
    """
    order = [0]
    while len(order) < lanes:
        # The order of twice as many lanes: first the even numbers, then the odd ones.
        evens = [2 * lane for lane in order]
        odds = [lane + 1 for lane in evens]
        order = evens + odds
    return order
