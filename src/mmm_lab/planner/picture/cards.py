"""A rank as a card: its number and place, and small grids of what it holds.

The outline of a grid is the full tensor, what is filled is the rank's part of it. The colour is that of the axis which
shards it, and the shade says which shard: the same colour in the same place is the same bytes. Grey: no axis
shards it. Several axes shard it: the colours of all, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmm import palette
from mmm_lab.planner.picture import words
from mmm_lab.planner.picture.facts import EXPERTS, Facts, Grid, Shard
from mmm_lab.planner.picture.scene import Item, Line, Rect, Text, paragraph, text_width, wrapped

PAD, SIDE = 9.0, 36.0  # inside a card; the longer side of a grid
SMALL, LABEL = 9.0, 9.5  # sizes of text
LEAST = 2.0  # sides of a part that is drawn
LIGHTEST = 0.42  # opacity of the last shard: to be seen on dark paper, too
NARROW = 130.0  # a card that is narrower says less
ALIASES = {"dp_shard_cp": "dp_shard", "expert_dp": "dp_shard", "cp_ring": "cp", "cp_ulysses": "cp"}


def color_of(axis: str) -> str:
    """Of an axis, also of those that are made of others."""
    return palette.AXES.get(ALIASES.get(axis, axis), palette.GREY)


def shade(shard: Shard) -> float:
    """The opacity of a shard: the first is full, the last the lightest."""
    return 1.0 if shard.count == 1 else 1.0 - (1 - LIGHTEST) * shard.index / (shard.count - 1)


def filled(shards: Sequence[Shard], x: float, y: float, width: float, height: float) -> list[Item]:
    """A rectangle in the colours of a part."""
    if not shards:
        return [Rect(x, y, width, height, fill=palette.GREY)]
    if len(shards) == 1:
        return [Rect(x, y, width, height, fill=color_of(shards[0].axis), opacity=shade(shards[0]))]
    # Stripes, beside each other or, of a narrow part, below each other.
    across = width >= height
    wide = width / len(shards) if across else width
    high = height if across else height / len(shards)
    stripes: list[Item] = []
    for place, shard in enumerate(shards):
        left = x + place * wide if across else x
        top = y if across else y + place * high
        stripes.append(Rect(left, top, wide, high, fill=color_of(shard.axis), opacity=shade(shard)))
    return stripes


def grid(grid: Grid, x: float, y: float, width: float, height: float) -> list[Item]:
    """The outline of a tensor, with the rank's part of it filled."""
    items: list[Item] = [Rect(x, y, width, height, fill="idle")]
    if not grid.empty:
        items += filled(grid.shards, *_inside(grid, x, y, width, height))
    if grid.label == EXPERTS:
        lines = [x + at * width / grid.columns for at in range(1, grid.columns if grid.columns <= 32 else 0)]
        items += [Line(at, y, at, y + height, "ink", 0.4) for at in lines]
    return [*items, Rect(x, y, width, height, stroke="ink", line=0.8)]


def sides(grid: Grid) -> tuple[float, float]:
    """Width and height: in the proportions of the tensor, within limits."""
    if grid.label == EXPERTS:
        return 2.1 * SIDE, 0.7 * SIDE
    ratio = min(max(grid.columns / grid.rows, 0.55), 1.8)
    return (SIDE, SIDE / ratio) if ratio >= 1 else (SIDE * ratio, SIDE)


def _label(grid: Grid) -> str:
    """What a grid is, and of experts which are here."""
    if grid.label != EXPERTS or grid.empty:
        return grid.label
    last = grid.right - 1
    which = f"expert {last}" if last == grid.left else f"experts {grid.left}–{last}"
    return f"{which} of {grid.columns}"


def card(facts: Facts, rank: int, x: float, y: float, width: float) -> tuple[list[Item], float]:
    """A rank's card without its frame, and its height."""
    items, below = _head(facts, rank, x + PAD, y + PAD, width - 2 * PAD)
    inner, left = width - 2 * PAD, x + PAD
    slot = left
    for each in facts.grids(rank):
        wide, high = sides(each)
        label = _label(each)
        needed = max(wide, 1.08 * text_width(label, 8.5))
        if slot > left and slot + needed > left + inner:
            slot = left
            below += SIDE + 20
        items.append(Text(slot, below + 10, label, 8.5))
        items += grid(each, slot, below + 15, wide, high)
        slot += needed + 5
    below += SIDE + 22 if facts.matrices else 0
    for part in (_modules, _batch):
        more, below = part(facts, rank, left, below, inner)
        items += more
    local, full = facts.elements(rank)
    if full and width >= NARROW:
        share = f"{local:,} of {full:,} parameters" if local != full else f"all {full:,} parameters"
        lines = wrapped(share + " of its stage" * (facts.layout.pp > 1), inner, SMALL)
        items += paragraph(lines, left, below + 9, SMALL, 12, 0.75)
        below += 12 * len(lines) + 2
    return items, below + PAD - 4 - y


def _head(facts: Facts, rank: int, left: float, top: float, width: float) -> tuple[list[Item], float]:
    place = facts.layout.coordinates(rank)
    if facts.layout.ep > 1:
        place["ep"] = place["dp_shard"] % facts.layout.ep
    named = [f"{axis} {at}" for axis, at in place.items() if getattr(facts.layout, axis) > 1]
    items: list[Item] = [Text(left, top + 10, f"rank {rank}", 12, bold=True)]
    text = " · ".join(named)
    needed = text_width(text, SMALL)
    if needed + text_width(f"rank {rank}  ", 12, bold=True) <= width:
        items += [Text(left + width, top + 10, text, SMALL, "end", opacity=0.75)] if text else []
        return items, top + 16
    lines = [text] if needed <= width else named
    items += paragraph(lines, left, top + 22, SMALL, 11, 0.75)
    return items, top + 17 + 11 * len(lines)


def _modules(facts: Facts, rank: int, left: float, top: float, width: float) -> tuple[list[Item], float]:
    """Of a pipeline: all modules in their order, those of the rank filled."""
    order, stages = facts.held(rank).modules, facts.held(rank).stages
    if not stages:
        return [], top
    own, step = facts.modules(rank), width / len(order)
    pp = facts.layout.coordinates(rank)["pp"]
    items: list[Item] = [Text(left, top + 9, "modules", LABEL)]
    for at, module in enumerate(order):
        box = left + at * step, top + 14, step - 2, 12
        items += filled([Shard("pp", pp, len(stages))], *box) if module in own else [Rect(*box, fill="idle")]
        items.append(Rect(*box, stroke="ink", line=0.6))
    lines = wrapped(words.modules(own), width, SMALL)
    items += paragraph(lines, left, top + 38, SMALL, 11, 0.75)
    return items, top + 36 + 11 * len(lines)


def _batch(facts: Facts, rank: int, left: float, top: float, width: float) -> tuple[list[Item], float]:
    """The samples of a step, a line each, and the tokens of each from left to right."""
    pieces, kept = facts.batch(rank), facts.between_products(rank)
    if not pieces:
        return [], top
    batch, narrow = pieces[0], width + 2 * PAD < NARROW
    own = f"sample {batch.bottom}" if batch.bottom - batch.top == 1 else f"samples {batch.top + 1}–{batch.bottom}"
    height = min(max(4.0 * batch.rows, 16.0), 36.0)
    down = top + 14
    items: list[Item] = [
        Text(left, top + 9, own if narrow else f"batch: {own} of {batch.rows}", LABEL),
        Rect(left, down, width, height, fill="idle"),
    ]
    for piece in pieces:
        items += filled(piece.shards, *_inside(piece, left, down, width, height))
    for row in range(1, batch.rows if batch.rows <= 16 else 0):
        y = down + row * height / batch.rows
        items.append(Line(left, y, left + width, y, "paper", 0.6))
    items.append(Rect(left, down, width, height, stroke="ink", line=0.8))
    items += [Rect(*_inside(piece, left, down, width, height), stroke=color_of("tp"), line=2.4) for piece in kept]
    below = down + height + 4
    shown = kept or pieces
    if not narrow and sum(piece.right - piece.left for piece in shown) < batch.columns:
        tokens = ", ".join(f"{piece.left}–{piece.right - 1}" for piece in shown)
        text = f"tokens {tokens}{' between products' if kept else ''}"
        items += paragraph([text], left, below + 9, SMALL, 13, 0.75)
        below += 13
    return items, below


def _inside(part: Grid, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    """Where a part is, in the rectangle of all."""
    across, down = width / part.columns, height / part.rows
    wide, high = max((part.right - part.left) * across, LEAST), max((part.bottom - part.top) * down, LEAST)
    return min(x + part.left * across, x + width - wide), min(y + part.top * down, y + height - high), wide, high
