"""A rank as a card: its number and coordinates, and small grids of what it holds.

The outline of a grid is the full tensor; the filled rectangle is the rank's shard. The colour is that of the axis that
shards the tensor, and the shade says which shard it is: the same colour in the same place is the same bytes. Grey means
that no axis shards it. If several axes shard it, their colours are side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmm import palette
from mmm_lab.planner.picture import words
from mmm_lab.planner.picture.facts import EXPERTS, Facts, Grid, Shard
from mmm_lab.planner.picture.scene import Item, Line, Rect, Text, paragraph, text_width, wrapped

PAD = 9.0  # inside a card
SIDE = 36.0  # longer side of a grid
SMALL = 9.0  # size of small text
LABEL = 9.5  # size of labels
LEAST = 2.0  # sides of the smallest rectangle that is drawn
LIGHTEST = 0.42  # opacity of the last shard; it has to be visible on dark paper
NARROW = 130.0  # a card that is narrower says less
ALIASES = {
    "dp_shard_cp": "dp_shard",
    "expert_dp": "dp_shard",
    "cp_ring": "cp",
    "cp_ulysses": "cp",
}


def color_of(axis: str) -> str:
    """The colour of an axis, also of one that is made of others."""
    return palette.AXES.get(ALIASES.get(axis, axis), palette.GREY)


def shade(shard: Shard) -> float:
    """The opacity of a shard: the first is opaque, the last the lightest."""
    if shard.count == 1:
        return 1.0
    return 1.0 - (1 - LIGHTEST) * shard.index / (shard.count - 1)


def filled(
    shards: Sequence[Shard],
    x: float,
    y: float,
    width: float,
    height: float,
) -> list[Item]:
    """A rectangle in the colours of some shards: a stripe for each."""
    if not shards:
        return [Rect(x, y, width, height, fill=palette.GREY)]
    # Stripes are side by side; in a narrow rectangle they are one below another.
    stripes: list[Item] = []
    step_x = 0.0
    step_y = 0.0
    if width >= height:
        width /= len(shards)
        step_x = width
    else:
        height /= len(shards)
        step_y = height
    for index, shard in enumerate(shards):
        left = x + index * step_x
        top = y + index * step_y
        stripes.append(
            Rect(
                left,
                top,
                width,
                height,
                fill=color_of(shard.axis),
                opacity=shade(shard),
            )
        )
    return stripes


def grid(
    grid: Grid,
    x: float,
    y: float,
    width: float,
    height: float,
) -> list[Item]:
    """The outline of a tensor, with the rank's shard filled."""
    items: list[Item] = [Rect(x, y, width, height, fill="idle")]
    if not grid.empty:
        items += filled(grid.shards, *_inside(grid, x, y, width, height))
    if grid.label == EXPERTS and grid.columns <= 32:
        for column in range(1, grid.columns):
            line_x = x + column * width / grid.columns
            items.append(
                Line(
                    line_x,
                    y,
                    line_x,
                    y + height,
                    stroke="ink",
                    line=0.4,
                )
            )
    items.append(Rect(x, y, width, height, stroke="ink", line=0.8))
    return items


def sides(grid: Grid) -> tuple[float, float]:
    """Width and height of a grid, in the proportions of the tensor within limits."""
    if grid.label == EXPERTS:
        return 2.1 * SIDE, 0.7 * SIDE
    # Without limits the matrix of a vocabulary would be a line.
    ratio = min(max(grid.columns / grid.rows, 0.55), 1.8)
    if ratio >= 1:
        return SIDE, SIDE / ratio
    return SIDE * ratio, SIDE


def _label(grid: Grid) -> str:
    """The name of a grid; for experts, which of them the rank has."""
    if grid.label != EXPERTS or grid.empty:
        return grid.label
    last = grid.right - 1
    if last == grid.left:
        return f"expert {last} of {grid.columns}"
    return f"experts {grid.left}–{last} of {grid.columns}"


def card(
    facts: Facts,
    rank: int,
    x: float,
    y: float,
    width: float,
) -> tuple[list[Item], float]:
    """A rank's card without its frame, and its height."""
    left = x + PAD
    inner = width - 2 * PAD
    # `below` is how far down the card is filled.
    items, below = _head(facts, rank, left, y + PAD, inner)
    slot = left
    for tensor in facts.grids(rank):
        grid_width, grid_height = sides(tensor)
        label = _label(tensor)
        # Estimated text widths are a little too small in some fonts.
        needed = max(grid_width, 1.08 * text_width(label, 8.5))
        # The grid does not fit next to the others: it begins a new line.
        if slot > left and slot + needed > left + inner:
            slot = left
            below += SIDE + 20
        items.append(Text(slot, below + 10, label, 8.5))
        items += grid(tensor, slot, below + 15, grid_width, grid_height)
        slot += needed + 5
    if facts.matrices:
        below += SIDE + 22
    for section in (_modules, _batch):
        section_items, below = section(facts, rank, left, below, inner)
        items += section_items
    # Numbers of parameters, of this rank and of all ranks of its stage.
    local, full = facts.elements(rank)
    if full and width >= NARROW:
        text = f"{local:,} of {full:,} parameters"
        if local == full:
            text = f"all {full:,} parameters"
        if facts.layout.pp > 1:
            text += " of its stage"
        lines = wrapped(text, inner, SMALL)
        items += paragraph(
            lines,
            left,
            below + 9,
            size=SMALL,
            step=12,
            opacity=0.75,
        )
        below += 12 * len(lines) + 2
    return items, below + PAD - 4 - y


def _head(
    facts: Facts,
    rank: int,
    left: float,
    top: float,
    width: float,
) -> tuple[list[Item], float]:
    """The rank's number and its coordinates, and where they end."""
    coordinates = facts.layout.coordinates(rank)
    if facts.layout.ep > 1:
        # ep takes its ranks from dp_shard.
        coordinates["ep"] = coordinates["dp_shard"] % facts.layout.ep
    texts = [f"{axis} {coordinate}" for axis, coordinate in coordinates.items() if getattr(facts.layout, axis) > 1]
    items: list[Item] = [Text(left, top + 10, f"rank {rank}", size=12, bold=True)]
    text = " · ".join(texts)
    needed = text_width(text, SMALL)
    # Next to the number if there is room, else below it.
    if needed + text_width(f"rank {rank}  ", 12, bold=True) <= width:
        if text:
            items.append(
                Text(
                    left + width,
                    top + 10,
                    text,
                    size=SMALL,
                    anchor="end",
                    opacity=0.75,
                )
            )
        return items, top + 16
    lines = [text] if needed <= width else texts
    items += paragraph(
        lines,
        left,
        top + 22,
        size=SMALL,
        step=11,
        opacity=0.75,
    )
    return items, top + 17 + 11 * len(lines)


def _modules(
    facts: Facts,
    rank: int,
    left: float,
    top: float,
    width: float,
) -> tuple[list[Item], float]:
    """In a pipeline, all modules in their order, with those of the rank filled; and where they end."""
    held = facts.held(rank)
    if not held.stages:
        return [], top
    own = facts.modules(rank)
    # All modules of the model are drawn, so that cards can be compared.
    step = width / len(held.modules)
    # One shade for each stage.
    shard = Shard("pp", facts.layout.coordinates(rank)["pp"], len(held.stages))
    items: list[Item] = [Text(left, top + 9, "modules", LABEL)]
    for index, module in enumerate(held.modules):
        box = left + index * step, top + 14, step - 2, 12
        items += filled([shard], *box) if module in own else [Rect(*box, fill="idle")]
        items.append(Rect(*box, stroke="ink", line=0.6))
    lines = wrapped(words.modules(own), width, SMALL)
    items += paragraph(
        lines,
        left,
        top + 38,
        size=SMALL,
        step=11,
        opacity=0.75,
    )
    return items, top + 36 + 11 * len(lines)


def _batch(
    facts: Facts,
    rank: int,
    left: float,
    top: float,
    width: float,
) -> tuple[list[Item], float]:
    """The samples of a step, a row each, with their tokens from left to right; and where they end."""
    pieces = facts.batch(rank)
    between_products = facts.between_products(rank)
    if not pieces:
        return [], top
    batch = pieces[0]
    label = f"samples {batch.top + 1}–{batch.bottom}"
    if batch.bottom - batch.top == 1:
        label = f"sample {batch.bottom}"
    narrow = width + 2 * PAD < NARROW
    if not narrow:
        label = f"batch: {label} of {batch.rows}"
    # A row of a large batch would be too thin to see.
    height = min(max(4.0 * batch.rows, 16.0), 36.0)
    down = top + 14
    items: list[Item] = [Text(left, top + 9, label, LABEL), Rect(left, down, width, height, fill="idle")]
    for piece in pieces:
        items += filled(piece.shards, *_inside(piece, left, down, width, height))
    # More lines would hide the colours.
    if batch.rows <= 16:
        for row in range(1, batch.rows):
            y = down + row * height / batch.rows
            items.append(
                Line(
                    left,
                    y,
                    left + width,
                    y,
                    stroke="paper",
                    line=0.6,
                )
            )
    items.append(Rect(left, down, width, height, stroke="ink", line=0.8))
    for piece in between_products:
        items.append(Rect(*_inside(piece, left, down, width, height), stroke=color_of("tp"), line=2.4))
    below = down + height + 4
    # With sequence parallelism a rank holds fewer tokens between the products than it computes with.
    shown = between_products or pieces
    if not narrow and sum(piece.right - piece.left for piece in shown) < batch.columns:
        text = "tokens " + ", ".join(f"{piece.left}–{piece.right - 1}" for piece in shown)
        if between_products:
            text += " between products"
        items += paragraph(
            [text],
            left,
            below + 9,
            size=SMALL,
            step=13,
            opacity=0.75,
        )
        below += 13
    return items, below


def _inside(
    grid: Grid,
    x: float,
    y: float,
    width: float,
    height: float,
) -> tuple[float, float, float, float]:
    """The shard's rectangle (x, y, width, height) inside the rectangle of the full tensor."""
    column = width / grid.columns
    row = height / grid.rows
    # A shard of 1,000 would be invisible.
    shard_width = max((grid.right - grid.left) * column, LEAST)
    shard_height = max((grid.bottom - grid.top) * row, LEAST)
    shard_x = min(x + grid.left * column, x + width - shard_width)
    shard_y = min(y + grid.top * row, y + height - shard_height)
    return shard_x, shard_y, shard_width, shard_height
