"""Of many ranks, those that are not drawn in full: a square each, in the colours of its part of the first matrix."""

from __future__ import annotations

from collections.abc import Sequence

from mmm.plan.picture import words
from mmm.plan.picture.cards import filled
from mmm.plan.picture.facts import Facts, Shard
from mmm.plan.picture.scene import Item, Rect, Text, wrapped

SIDE, APART = 8.0, 1.5  # of a square; between two
MOST = 4096  # squares


def crowd(facts: Facts, shown: Sequence[int], x: float, y: float, width: float) -> tuple[list[Item], float]:
    """The squares, hosts together, and what is the same for all; and where it ends."""
    items = list[Item]()
    for text in words.others(facts, shown):
        for line in wrapped(text, width, 11):
            y += 15
            items.append(Text(x, y, line, 11))
    y += 12
    if facts.layout.ranks > MOST:
        return items, y
    left, rank = x, 0
    for count in facts.hosts:
        wide = count * (SIDE + APART) + 4
        if left + wide > x + width:
            left, y = x, y + SIDE + 7
        if rank in shown:
            items.append(Rect(left - 3, y - 3, wide + 1, SIDE + 6, stroke="ink", radius=2))
        for own in range(rank, rank + count):
            items += filled(_shards(facts, own), left + (own - rank) * (SIDE + APART), y, SIDE, SIDE)
        rank, left = rank + count, left + wide + 4
    items.append(Text(x, y + SIDE + 15, "each square a rank, each group of squares a host", 9.5, opacity=0.75))
    return items, y + SIDE + 22


def _shards(facts: Facts, rank: int) -> list[Shard]:
    grids, pp = facts.grids(rank), facts.layout.pp
    stage = [Shard("pp", facts.layout.coordinates(rank)["pp"], pp)] if pp > 1 else []
    return [*stage, *(grids[0].shards if grids else ())]
