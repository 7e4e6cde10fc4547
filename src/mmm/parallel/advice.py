"""Rules that sizes break on a layout, and what to change: advice is tried on all the rules before it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mmm.errors import LayoutError
from mmm.layout import Layout


@dataclass(frozen=True)
class Broken:
    """A rule that is broken.

    Attributes:
        rule: its name among the others. text: what was given, and the rule, with the numbers.
        size: the size that can be changed; empty for none. axes: of the layout, that can be made smaller.
        field: another field with the value that would do, such as ``cp_style ring``.
    """

    rule: str
    text: str
    size: str = ""
    axes: tuple[str, ...] = ()
    field: str = ""


FindBroken = Callable[[Mapping[str, int], Layout], list[Broken]]
REACH = 4  # how many times as large a size may be that is advised


def check_sizes(find: FindBroken, sizes: Mapping[str, int], layout: Layout) -> None:
    """Whether no rule is broken; else every broken rule is named, each with what to change.

    A size that is advised fixes its rule and breaks no other; where several rules are broken, the first advice of each
    together fixes all. A smaller axis fixes all by itself, on the same ranks.

    Args:
        find: (sizes, layout) → the rules that are broken. sizes: by name.

    Raises:
        LayoutError: a rule is broken.
    """
    fixed, sentences, fields = dict(sizes), [], []
    for broken in find(sizes, layout):
        left, ways = {other.rule for other in find(fixed, layout)}, []
        if broken.size and broken.rule in left:

            def passes(
                size: int, name: str = broken.size, allowed: frozenset = frozenset(left - {broken.rule})
            ) -> bool:
                return {other.rule for other in find({**fixed, name: size}, layout)} <= allowed

            if near := nearest(fixed[broken.size], passes):
                ways.append(f"{broken.size} {' or '.join(map(str, near))}")
                fixed[broken.size] = near[0]
        for axis in broken.axes:
            ways += [f"{axis} {size}" for size in smaller(axis, layout, lambda other: not find(sizes, other))]
        if broken.field:
            ways.append(broken.field)
            fields.append(broken.field)
        sentences.append(f"{broken.text}: use {', or '.join(ways)}" if ways else broken.text)
    if sentences:
        raise LayoutError("; ".join(sentences), fields=tuple(fields))


def nearest(size: int, passes: Callable[[int], bool]) -> list[int]:
    """The nearest number below `size`, and the nearest above, that pass; one or none where there is no other."""
    below, above = range(size - 1, 0, -1), range(size + 1, REACH * max(size, 16) + 1)
    found = (next(filter(passes, numbers), None) for numbers in (below, above))
    return [number for number in found if number is not None]


def smaller(axis: str, layout: Layout, passes: Callable[[Layout], bool]) -> list[int]:
    """The largest smaller size of an axis with which the same ranks make a layout that passes; [] for none."""
    size = getattr(layout, axis)
    shared = size * layout.dp_shard if axis != "ep" else layout.dp_shard  # what the axis leaves is data parallel
    for less in range(size - 1, 0, -1):
        if layout.dp_shard > 0 and (shared % less or (axis != "ep" and shared // less % layout.ep)):
            continue
        dp_shard = shared // less if axis != "ep" and layout.dp_shard > 0 else layout.dp_shard
        if passes(replace(layout, **{axis: less, "dp_shard": dp_shard})):
            return [less]
    return []
