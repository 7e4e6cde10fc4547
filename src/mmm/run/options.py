"""The flags of a program, as its config has them in groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from mmm.errors import ConfigError


def flag_fields(config: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Field and value of every flag, also of those in groups."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flag_fields(value)
        else:
            yield field, value


def flags_of(config: Any) -> dict[str, Any]:
    """The value of every flag, by its name."""
    return {field.name: value for field, value in flag_fields(config)}


def checkpoint_options(config: Any) -> Any:
    """The flags of checkpoints of a program: one of its groups, or the config itself. None where it has none."""
    if config is None:
        return None
    return next((group for group in (config, *vars(config).values()) if hasattr(group, "checkpoint_every")), None)


def parse_steps(text: str) -> range:
    """The steps of ``FROM:TO``, TO not among them. Raises ConfigError where it is not that."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--profile_steps {text}: give FROM:TO, such as 10:13 for the steps 10, 11 and 12")
    return range(int(first), int(end))
