"""Replaces functions of PyTorch's, and of the package, for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

# A function: the class or module that has it, and its name there.
Place = tuple[Any, str]


def replaced(owner: Any, **values: Any) -> AbstractContextManager[None]:
    """Inside, attributes of a class or a module have these values."""
    return all_replaced(((owner, name), value) for name, value in values.items())


@contextmanager
def all_replaced(changes: Iterable[tuple[Place, Any]]) -> Iterator[None]:
    """Inside, each of these places has another value.

    Args:
        changes: (place, its value), in the order in which they are made. Iterating may read what was changed before.
    """
    with ExitStack() as stack:
        for (owner, name), value in changes:
            # As it is stored: `getattr` makes another object of a static method, and of a method of C++.
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                # It was inherited.
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield
