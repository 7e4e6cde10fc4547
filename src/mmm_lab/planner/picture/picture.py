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
from mmm_lab.planner.picture.svg import Drawing
from mmm_lab.planner.picture.words import meaning, whom

MARGIN = 16.0
PAD = 10.0  # inside a card
GAP = 12.0  # between cards
SLOT = 66.0  # least width for a grid and its label
SIDE = 48.0  # height of a grid
LEAST = 3.0  # sides of the smallest piece that is drawn
SHOWN = 16  # the most ranks that are drawn
MOST_COLUMNS = 4
NARROW = 560.0  # a picture that is narrower has one column
HEADINGS = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer step"}
READ = "Outline: the full tensor. Filled: the rank's piece. Colour: the axis that cuts it; stripes: several axes."


def picture(facts: Facts, made_by: str, width: float, theme: str = "auto") -> str:
    """The picture of a layout, as SVG.

    Args:
        made_by: the command that draws it.
        width: in pixels.
    """
    layout = facts.layout
    inner = width - 2 * MARGIN
    drawing = Drawing(width)
    title = f"{layout}, {counted(layout.ranks, 'rank')}"
    # FSDP shards over the ranks of cp too.
    if layout.dp * layout.cp > 1:
        title += f", {facts.techniques.data_parallel}"
    drawing.text(MARGIN, 32, title, 18, font_weight=600)
    x = MARGIN
    for axis in [*(axis for axis in AXES if layout.sizes.get(axis, layout.ep) > 1), "not cut"]:
        drawing.rect((x, 44, 12, 12), color_of(axis))
        drawing.text(x + 17, 54, axis)
        x += 36 + 7 * len(axis)
    y = drawing.paragraph(MARGIN, 56, READ, inner)
    y = _cards(drawing, facts, y + 14)
    if layout.ranks > SHOWN:
        y = drawing.paragraph(MARGIN, y, f"Ranks 0 to {SHOWN - 1} of {layout.ranks:,}: the others are alike.", inner)
    y += 30
    drawing.text(MARGIN, y, "Who sends what to whom, and when", 14, font_weight=600)
    for report in facts.dry.ranks:
        y = _table(drawing, facts, report.rank, y)
    # A rank of another stage has the same of its own layers.
    drawn = re.sub(r"\b\d+\b", "*", ", ".join(tensor.name for tensor in facts.matrices))
    report = facts.dry.ranks[0]
    source = f"Bytes: of a dry run ({report.precision}, {report.device}); those of a ring for collectives."
    for line in (f"Drawn: {drawn}; gradient and optimizer state of the first.", source, made_by):
        y = drawing.paragraph(MARGIN, y + 4, line, inner)
    return drawing.svg(y + MARGIN, title, theme)


def color_of(axis: str) -> str:
    """The class of an axis's colour. An axis that is made of others has that of the first."""
    if axis == "expert_dp":
        return "dp_shard"
    return next((name for name in AXES if axis.startswith(name)), "grey")


def _cards(drawing: Drawing, facts: Facts, y: float) -> float:
    """All cards, and where they end. A row has the ranks of the innermost axis, where they fit."""
    columns = 1
    for size in facts.layout.sizes.values():
        if size > 1 and drawing.width >= NARROW:
            columns = min(size, MOST_COLUMNS)
    width = (drawing.width - 2 * MARGIN - (columns - 1) * GAP) / columns
    ranks = range(min(facts.layout.ranks, SHOWN))
    for first in ranks[::columns]:
        lefts = {rank: MARGIN + (rank - first) * (width + GAP) for rank in ranks[first : first + columns]}
        # All cards of a row are as high as the highest.
        bottom = max(_card(drawing, facts, rank, left, y, width) for rank, left in lefts.items()) + PAD
        for left in lefts.values():
            drawing.rect((left, y, width, bottom - y), "line", rx=6)
        y = bottom + GAP
    return y


def _card(drawing: Drawing, facts: Facts, rank: int, x: float, y: float, width: float) -> float:
    """A rank's card without its frame, and where it ends."""
    left = x + PAD
    inner = width - 2 * PAD
    drawing.text(left, y + 20, f"rank {rank}", 14, font_weight=600)
    y = drawing.paragraph(left, y + 20, facts.place(rank) or "one device", inner)
    per_row = int(inner // SLOT)
    for index, grid in enumerate(facts.grids(rank)):
        column = index % per_row
        if column == 0:
            y += SIDE + 26
        slot = left + column * inner / per_row
        drawing.text(slot, y - SIDE - 6, grid.label)
        # Without limits the matrix of a vocabulary would be a line.
        ratio = min(max(grid.columns / grid.rows, 0.5), 1.25)
        _grid(drawing, grid, (slot, y - SIDE, SIDE * ratio, SIDE))
    batch = facts.batch(rank)
    if batch:
        y = drawing.paragraph(left, y + 4, batch.label, inner, "ink") + 36
        _grid(drawing, batch, (left, y - 30, inner, 30))
    modules = facts.modules(rank)
    if modules:
        y = drawing.paragraph(left, y + 2, ", ".join(modules), inner)
    return y


def _grid(drawing: Drawing, grid: Grid, box: tuple[float, float, float, float]) -> None:
    """The outline of a tensor, with the rank's pieces filled."""
    drawing.rect(box, "idle")
    x, y, width, height = box
    colors = list(dict.fromkeys(color_of(axis) for axis in grid.axes)) or ["grey"]
    for top, left, rows, columns in grid.pieces:
        # A piece of a thousandth would be invisible.
        piece_width = max(columns * width / grid.columns, LEAST)
        piece_height = max(rows * height / grid.rows, LEAST)
        piece_x = x + min(left * width / grid.columns, width - piece_width)
        piece_y = y + min(top * height / grid.rows, height - piece_height)
        style = {}
        if len(colors) > 1:
            style["style"] = drawing.stripes(colors)
        drawing.rect((piece_x, piece_y, piece_width, piece_height), colors[0], **style)
    drawing.rect(box, "line", stroke_width=0.8)


def _table(drawing: Drawing, facts: Facts, rank: int, y: float) -> float:
    """What a rank sends in a step, a row for each kind of call; and where the table ends."""
    inner = drawing.width - 2 * MARGIN
    for doing, heading in HEADINGS.items():
        y += 28
        drawing.text(MARGIN, y, heading, 13, font_weight=600)
        drawing.text(MARGIN + inner, y, f"rank {rank} sends", color="muted", text_anchor="end")
        y += 6
        drawing.rect((MARGIN, y, inner, 1), "ink")
        # A group of one rank has calls that send nothing.
        flows = [flow for flow in facts.flows(rank) if flow.doing == doing and flow.sent]
        for flow in flows:
            drawing.rect((MARGIN, y + 8, 11, 11), color_of(flow.axis))
            drawing.text(MARGIN + 18, y + 18, f"{flow.calls} × {flow.operation.replace('_', '-')} over {flow.axis}")
            drawing.text(MARGIN + inner, y + 18, units.size(flow.sent), text_anchor="end")
            about = f"{whom(facts, rank, flow)}: {meaning(facts, flow)}"
            y = drawing.paragraph(MARGIN + 18, y + 18, about, inner - 18)
        if not flows:
            y = drawing.paragraph(MARGIN + 18, y + 2, "nothing", inner)
    return y
