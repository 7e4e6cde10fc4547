"""Numbers that know what they are on every rank, so that one rank's run says which other ranks would run as it did.

::

    alike = Alike(rank=3, world_size=1024)
    rank = alike.number(range(1024))      # 3, as far as the program can tell
    seed = 7 + 10_000_000 * rank          # 30000007, and the seeds of all the others
    if rank == 1000: ...                  # taken as on rank 3. From now on alike.alike[1000] is False

A rank parts from this one where a comparison has another outcome, or where a number is beyond the end of a type of C
and this rank's is not. What a program makes of its rank by text, by floats, by NumPy or by ``range(rank)`` is a plain
number again, and its comparisons part nobody.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

# Ends of int32, uint32, int64 and uint64: a seed or a size above one of them may be refused, or begin again at 0.
ENDS = (2**31, 2**32, 2**63, 2**64)
COMPUTED = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


class Alike:
    """Which ranks have run as this one until now.

    Attributes:
        rank: the rank that runs.
        alike: (world_size,) bool.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.alike = np.ones(world_size, dtype=bool)

    def number(self, by_rank: Iterable[int]) -> RankNumber:
        """A number, from its values by rank."""
        # Python's own integers: they have no end.
        values = np.array([*by_rank], dtype=object)
        for end in ENDS:
            self.decide(values >= end)
        return RankNumber(self, values)

    def decide(self, outcomes: np.ndarray) -> bool:
        """This rank's outcome, from those of all ranks. Those with another one are no longer alike."""
        own = bool(outcomes[self.rank])
        self.alike &= outcomes.astype(bool) == own
        return own


class RankNumber(int):
    """An integer with its values on all ranks. Those of ranks that have parted mean nothing.

    Attributes:
        values: (world_size,) Python integers.
    """

    alike: Alike
    values: np.ndarray

    def __new__(cls, alike: Alike, values: np.ndarray) -> RankNumber:
        self = super().__new__(cls, values[alike.rank])
        self.alike = alike
        self.values = values
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets the plain number.
        return int, (int(self),)

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self.alike.decide(self.values != 0)

    def __neg__(self) -> int:
        return 0 - self

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self


def _computed(name: str, reflected: bool) -> Callable[[RankNumber, Any], Any]:
    python_name = f"{name}_" if name in ("and", "or") else name
    compute = getattr(operator, python_name)
    plain = getattr(int, f"__r{name}__" if reflected else f"__{name}__")

    def method(self: RankNumber, other: Any) -> Any:
        own = plain(self, other)
        if not isinstance(other, int):
            return own
        others = other.values if isinstance(other, RankNumber) else np.full_like(self.values, int(other))
        left, right = self.values, others
        if reflected:
            left, right = right, left
        if name in ("floordiv", "mod"):
            # Where it is 0, that rank ends with an error.
            self.alike.decide(right == 0)
        alike = self.alike.alike
        values = np.full_like(self.values, own)
        values[alike] = compute(left[alike], right[alike])
        return self.alike.number(values)

    return method


def _compared(name: str) -> Callable[[RankNumber, Any], Any]:
    compare = getattr(operator, name)
    plain = getattr(int, f"__{name}__")

    def method(self: RankNumber, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return plain(self, other)
        others = other.values if isinstance(other, RankNumber) else other
        return self.alike.decide(compare(self.values, others))

    return method


for _name in COMPUTED:
    setattr(RankNumber, f"__{_name}__", _computed(_name, reflected=False))
    setattr(RankNumber, f"__r{_name}__", _computed(_name, reflected=True))
for _name in COMPARED:
    setattr(RankNumber, f"__{_name}__", _compared(_name))
