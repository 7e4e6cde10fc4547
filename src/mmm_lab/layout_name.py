"""The name of a layout, such as ``pp2·dp2·tp2``, taken apart: what `Layout.__str__` writes, and what people type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from mmm.errors import ConfigError
from mmm.layout import AXES
from mmm_launch.errors import did_you_mean

ALL_AXES = (*AXES, "ep")
MOST = 2**20  # ranks of an axis
NO_WORDS: Mapping[str, str] = MappingProxyType({})


def words_of(name: str) -> list[str]:
    """Its parts: a dot (· or .), a comma, a star or a space stands between them."""
    return re.split(r"[·,.*\s]+", name.strip())


def parse_layout(name: str, further: Mapping[str, str] = NO_WORDS) -> tuple[dict[str, int], list[str]]:
    """The sizes of the axes that a layout's name has, in any order, and those of the `further` words that it has.

    Args:
        name: each axis with its size, as ``tp2`` or ``tp=2``; ``dp`` is dp_shard; ``1`` is a single rank.
        further: words that may stand beside them, as ``zero1`` or ``zero1:8``: of each, whose size stands behind it.

    Raises:
        ConfigError: it is no such name.
    """
    axis_of = {axis: axis for axis in ALL_AXES} | {"dp": "dp_shard"} | dict(further)
    sizes: dict[str, int] = {}
    names = []
    for word in words_of(name):
        if word == "1":
            continue
        match = re.fullmatch(rf"({'|'.join(axis_of)})[:=]?(\d*)", word)
        if match is None or not (match[2] or match[1] in further):
            raise ConfigError(f"layout {name!r}: {word!r} is no axis with its size: {_help(word, list(axis_of))}")
        own, digits = match.groups()
        names.append(own)
        if not digits:
            continue
        if len(digits) > len(str(MOST)) or not 1 <= int(digits) <= MOST:
            raise ConfigError(f"layout {name!r}: {own} {digits[:20]}: an axis has 1 to {MOST:,} ranks")
        if axis_of[own] in sizes:
            raise ConfigError(f"layout {name!r} has {axis_of[own]} twice: give each axis once")
        sizes[axis_of[own]] = int(digits)
    if {"dp", "dp_replicate"} <= {*names}:
        raise ConfigError(f"layout {name!r}: dp alone means dp_shard (FSDP); beside dp_replicate write dp_shard")
    return sizes, [own for own in names if own in further]


def _help(word: str, names: list[str]) -> str:
    said = f"such as pp2·dp2·tp2, of {', '.join(names)}; 1 is a single rank"
    if word in names:
        return f"{said}. How many ranks, such as {word}2?"
    hint = did_you_mean(re.sub(r"\W|\d", "", word), names)
    return f"{said}.{hint}" if hint else said
