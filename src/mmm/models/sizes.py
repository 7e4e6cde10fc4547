"""What the configurations of all models check alike."""

from __future__ import annotations

from collections.abc import Iterable


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """The sizes of `config`, by name, that are below 1: one sentence each."""
    return [f"{name} is {getattr(config, name)}: it must be at least 1" for name in names if getattr(config, name) < 1]
