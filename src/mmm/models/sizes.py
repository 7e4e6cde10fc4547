"""What the configurations of all models check alike."""

from __future__ import annotations

from collections.abc import Iterable


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """The sizes of `config`, by name, that are below 1: one sentence each. One that is None follows from the others."""
    sizes = {name: getattr(config, name) for name in names}
    return [f"{name} is {size}: it must be at least 1" for name, size in sizes.items() if size is not None and size < 1]
