"""The name of a layout, such as ``pp2·dp2·tp2``, taken apart: what `Layout.__str__` writes, and what people type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from mmm.errors import ConfigError
from mmm.layout import AXES, Layout

ALL_AXES = (*AXES, "ep")
MOST = 2**20  # ranks of an axis
NO_TECHNIQUES: Mapping[str, str] = MappingProxyType({})


def split_axes(layout: Layout) -> list[str]:
    """The axes that have several ranks."""
    # ep is not in `Layout.sizes`, because it uses ranks of dp_shard.
    return [axis for axis in ALL_AXES if getattr(layout, axis) > 1]


def words_of(name: str) -> list[str]:
    """Split a name into its words. A dot (· or .), a comma, a star or a space stands between them."""
    return re.split(r"[·,.*\s]+", name.strip())


def parse_layout(name: str, techniques: Mapping[str, str] = NO_TECHNIQUES) -> tuple[dict[str, int], list[str]]:
    """Read the name of a layout.

    Args:
        name: axes with their sizes, in any order, as ``tp2`` or ``tp=2``. ``dp`` means dp_shard, ``1`` a single rank.
        techniques: words that may stand between them, such as ``zero1`` or ``zero1:8``, each with the axis that a size
            behind it is of.

    Returns:
        The size of each axis, and the techniques that were named.

    Raises:
        ConfigError: it is not such a name.
    """
    # Word → the axis that its size is of.
    axis_of = dict(zip(ALL_AXES, ALL_AXES, strict=True))
    axis_of["dp"] = "dp_shard"
    axis_of.update(techniques)
    pattern = rf"({'|'.join(axis_of)})[:=]?(\d*)"
    sizes = {}
    names = []
    for text in words_of(name):
        if text == "1":
            continue
        match = re.fullmatch(pattern, text)
        # Only a technique may stand without a size.
        if match is None or not (match[2] or match[1] in techniques):
            raise ConfigError(
                f"layout {name!r}: {text!r} is not an axis with its size: such as pp2·dp2·tp2, of "
                f"{', '.join(axis_of)}; 1 is a single rank"
            )
        word = match[1]
        digits = match[2]
        names.append(word)
        if not digits:
            continue
        # Python refuses to convert thousands of digits.
        too_long = len(digits) > len(str(MOST))
        if too_long or not 1 <= int(digits) <= MOST:
            raise ConfigError(f"layout {name!r}: {word} {digits[:20]}: an axis has 1 to {MOST:,} ranks")
        axis = axis_of[word]
        if axis in sizes:
            raise ConfigError(f"layout {name!r} has {axis} twice: give each axis once")
        sizes[axis] = int(digits)
    # Next to dp_replicate, dp might mean both axes.
    if "dp" in names and "dp_replicate" in names:
        raise ConfigError(f"layout {name!r}: dp means dp_shard (FSDP); next to dp_replicate write dp_shard")
    return sizes, [word for word in names if word in techniques]
