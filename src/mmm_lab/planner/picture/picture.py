"""The picture of a layout: a card for each rank, with what it holds, and a table of who sends what to whom, and when.

On a card the outline of a small grid is the full tensor, and the filled piece is the rank's. Its place says which piece
it is, its colour which axis cuts the tensor. A piece that several axes cut has stripes in their colours. Grey is not
cut. The cards are in the order of the ranks.
"""

from __future__ import annotations

import re

from mmm import units
from mmm.palette import AXES
from mmm.units import counted
from mmm_lab.planner.picture.facts import Facts, Grid
from mmm_lab.planner.picture.svg import CHARACTER, TEXT, Column, Drawing
from mmm_lab.planner.picture.words import meaning, whom

MARGIN = 16.0
# Inside a card, and between cards.
PAD = 10.0
GAP = 12.0
# Where the text beside a square of colour begins.
INDENT = 18.0
# Height of a grid, and sides of the smallest piece that is drawn.
SIDE = 48.0
BATCH_SIDE = 30.0
LEAST = 3.0
# The most ranks that are drawn, and the most that are side by side.
SHOWN = 16
MOST_COLUMNS = 4
# A picture that is narrower has one card a row. One that is wider has the parts of a step side by side.
NARROW = 528.0
WIDE = 1000.0
HEADINGS = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer step"}
READ = "Outline: the full tensor. Filled: the rank's piece. Colour: the axis that cuts it; stripes: several axes."


def picture(facts: Facts, made_by: str, width: float) -> str:
    """The picture of a layout, as SVG.

    Args:
        made_by: the command that draws it.
        width: in pixels.
    """
    layout = facts.layout
    drawing = Drawing(width)
    page = Column(
        drawing,
        left=MARGIN,
        width=width - 2 * MARGIN,
        y=0.0,
    )
    title = f"{layout}, {counted(layout.ranks, 'rank')}"
    # FSDP shards over the ranks of cp too.
    if layout.dp * layout.cp > 1:
        title += f", {facts.techniques.data_parallel}"
    page.heading(title, size=18)
    _legend(page, facts)
    page.text(READ)
    page.y += GAP
    _cards(page, facts)
    if layout.ranks > SHOWN:
        page.text(f"Ranks 0 to {SHOWN - 1} of {layout.ranks:,}: the others are alike.")
    page.heading("Who sends what to whom, and when", size=14)
    for report in facts.dry.ranks:
        _table(page, facts, report.rank)
    held = facts.held(0)
    names = ", ".join(tensor.name for tensor in facts.matrices)
    # A rank of another stage has the same of its own layers.
    drawn = re.sub(r"\b\d+\b", "*", names)
    page.y += GAP
    page.text(f"Drawn: {drawn}; gradient and optimizer state of the first.")
    page.text(f"Bytes: of a dry run ({held.precision}, {held.device}); those of a ring for collectives.")
    page.text(made_by)
    return drawing.svg(page.y + MARGIN, title)


def color_of(axis: str) -> str:
    """The class of an axis's colour. An axis that is made of others has that of the first."""
    if axis == "expert_dp":
        return "dp_shard"
    return next((name for name in AXES if axis.startswith(name)), "grey")


def _legend(page: Column, facts: Facts) -> None:
    """The colours of the layout's axes, in as many lines as they need."""
    x = page.left
    page.y += INDENT + 4
    for axis in [*facts.axes, "not cut"]:
        width = 2 * INDENT + len(axis) * TEXT * CHARACTER
        if x + width > page.right:
            x = page.left
            page.y += INDENT
        page.square(x, color_of(axis))
        page.write(axis, x + INDENT)
        x += width


def _cards(page: Column, facts: Facts) -> None:
    """All cards. A row has the ranks of the innermost axis, where they fit."""
    layout = facts.layout
    columns = 1
    for size in layout.sizes.values():
        if size > 1 and page.width >= NARROW:
            columns = min(size, MOST_COLUMNS)
    ranks = range(min(layout.ranks, SHOWN))
    for first in ranks[::columns]:
        # Between the texts of two cards are both margins and the gap.
        row = page.beside(columns, GAP + 2 * PAD)[: len(ranks) - first]
        for rank, card in enumerate(row, start=first):
            _card(card, facts, rank)
        # All cards of a row are as high as the highest.
        bottom = max(card.y for card in row) + PAD
        for card in row:
            page.drawing.add(
                "rect",
                x=card.left - PAD,
                y=page.y,
                width=card.width + 2 * PAD,
                height=bottom - page.y,
                class_="line",
                rx=6,
            )
        page.y = bottom + GAP


def _card(card: Column, facts: Facts, rank: int) -> None:
    """A rank's card without its frame."""
    card.heading(f"rank {rank}", size=14)
    card.text(facts.place(rank) or "one device")
    card.y += 4
    grids = facts.grids(rank)
    # A slot takes the longest label.
    longest = max((len(grid.label) for grid in grids), default=1)
    per_row = int(card.width / (longest * TEXT * CHARACTER + 4)) or 1
    while grids:
        for slot, grid in zip(card.beside(per_row), grids, strict=False):
            slot.text(grid.label, color="ink")
            # Without limits the matrix of a vocabulary would be a line.
            ratio = min(max(grid.columns / grid.rows, 0.5), 1.25)
            _grid(slot, grid, SIDE * ratio, SIDE)
            bottom = slot.y
        card.y = bottom
        grids = grids[per_row:]
    batch = facts.batch(rank)
    if batch is not None:
        card.text(batch.label, color="ink")
        _grid(card, batch, card.width, BATCH_SIDE)
    card.text(", ".join(facts.modules(rank)))


def _grid(column: Column, grid: Grid, width: float, height: float) -> None:
    """The outline of a tensor below what a column has, with the rank's pieces filled."""
    drawing = column.drawing
    x = column.left
    y = column.y + 6
    outline = {
        "x": x,
        "y": y,
        "width": width,
        "height": height,
    }
    drawing.add("rect", **outline, class_="idle")
    colors = list(dict.fromkeys(color_of(axis) for axis in grid.axes)) or ["grey"]
    fill = drawing.fill(colors)
    for top, left, rows, columns in grid.pieces:
        piece_x, piece_width = _scaled(left, columns, width / grid.columns, width)
        piece_y, piece_height = _scaled(top, rows, height / grid.rows, height)
        drawing.add(
            "rect",
            x=x + piece_x,
            y=y + piece_y,
            width=piece_width,
            height=piece_height,
            class_=fill,
        )
    drawing.add(
        "rect",
        **outline,
        class_="line",
        stroke_width=0.8,
    )
    column.y = y + height + 4


def _scaled(first: int, count: int, scale: float, full: float) -> tuple[float, float]:
    """Where rows or columns begin in a grid of `full` pixels, and how many pixels they have."""
    # A piece of a thousandth would be invisible.
    length = max(count * scale, LEAST)
    return min(first * scale, full - length), length


def _table(page: Column, facts: Facts, rank: int) -> None:
    """What a rank sends in a step, a row for each kind of call."""
    # A group of one rank has calls that send nothing.
    flows = [flow for flow in facts.flows(rank) if flow.sent]
    # The parts of a step side by side, where there is room, or one below another.
    columns = [page] * len(HEADINGS)
    if page.width > WIDE:
        columns = page.beside(len(HEADINGS), 2 * GAP)
    for column, (doing, heading) in zip(columns, HEADINGS.items(), strict=True):
        column.y += 4
        column.heading(heading, size=13)
        column.write(
            f"rank {rank} sends",
            column.right,
            color="muted",
            text_anchor="end",
        )
        column.y += 6
        column.drawing.add(
            "rect",
            x=column.left,
            y=column.y,
            width=column.width,
            height=1,
            class_="ink",
        )
        column.y += 2
        rows = [flow for flow in flows if flow.doing == doing]
        for flow in rows:
            operation = flow.operation.replace("_", "-")
            column.text(f"{flow.calls} × {operation} over {flow.axis}", color="ink", indent=INDENT)
            column.square(column.left, color_of(flow.axis))
            column.write(units.size(flow.sent), column.right, text_anchor="end")
            column.text(f"{whom(facts, rank, flow)}: {meaning(facts, flow)}", indent=INDENT)
            column.y += 2
        if not rows:
            column.text("nothing", indent=INDENT)
    page.y = max(column.y for column in columns)
