"""The picture of the guide's chapter on bits: in which order the gradients of four lanes are added on 1, 2 and 4 ranks.

    python benchmarks/guide_tree.py [--out docs/guide/curves/same-bits.svg]

The upper row is the usual way, the lower row one fixed tree. Nothing is measured, so the file is the same everywhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmm.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from mmm_lab.planner.picture.svg import Drawing

# An element: its tag, its text and its attributes.
Item = tuple[str, str, dict[str, Any]]
# The index of a lane, or a sum of two trees.
Tree = int | tuple["Tree", "Tree"]

LANES = 4
# Colours of the ranks. What is sent is vermilion.
RANKS = (BLUE, GREEN, PURPLE, ORANGE)
FIXED: Tree = ((0, 2), (1, 3))
# By the number of ranks. A ring adds the chunk of rank 0 up on its way from rank 1 to rank 0.
USUAL: dict[int, Tree] = {1: (((0, 1), 2), 3), 2: ((0, 1), (2, 3)), 4: (((1, 2), 3), 0)}
SUBSCRIPTS = "₀₁₂₃"
PANEL = 300.0
LANE = 52.0
LEVEL = 46.0

TITLE = "Four lanes on 1, 2 and 4 ranks: the usual order of their sum, and one fixed tree"


def text(x: float, y: float, content: str, size: int, **attributes: Any) -> Item:
    """A text around x."""
    style = {"font_size": size, "text_anchor": "middle", "class_": "ink"}
    return "text", content, {"x": x, "y": y} | style | attributes


def white(x: float, y: float, content: str, size: int) -> Item:
    """A text on a colour."""
    return text(x, y, content, size, font_weight=600, class_="", fill="#ffffff")


def box(x: float, y: float, width: float, height: float, fill: str, radius: int) -> Item:
    return "rect", "", {"x": x, "y": y, "width": width, "height": height, "fill": fill, "rx": radius}


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = "", width: float = 1.2) -> Item:
    """A line; without a colour it has that of text."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    if stroke:
        return "line", "", ends | {"stroke_width": width, "stroke": stroke}
    return "line", "", ends | {"stroke_width": width, "class_": "line"}


def formula(tree: Tree) -> str:
    """A tree as a formula, with brackets around inner sums."""
    if isinstance(tree, int):
        return f"g{SUBSCRIPTS[tree]}"
    terms = []
    for branch in tree:
        text = formula(branch)
        terms.append(text if isinstance(branch, int) else f"({text})")
    return " + ".join(terms)


def owner(tree: Tree, ranks: int, fixed: bool) -> int:
    """The rank that has the value of a tree, for the shard that rank 0 keeps."""
    if isinstance(tree, int):
        return tree * ranks // LANES
    owners = [owner(branch, ranks, fixed) for branch in tree]
    # An all-to-all sends every lane to the rank of the shard, which adds. Otherwise the second rank of a sum adds what
    # it receives from the first, unless rank 0 is one of them.
    if fixed or 0 in owners:
        return 0
    return owners[1]


def draw(tree: Tree, ranks: int, fixed: bool, x: float, y: float) -> tuple[list[Item], float, int]:
    """The shapes of a tree whose lanes stand at height y, the first one at x.

    Returns:
        The shapes, the x of its root, and the number of its levels.
    """
    colour = RANKS[owner(tree, ranks, fixed)]
    if isinstance(tree, int):
        middle = x + tree * (LANE + 12) + LANE / 2
        lane = box(middle - LANE / 2, y, LANE, 26, colour, 4)
        return [lane, white(middle, y + 18, formula(tree), 13)], middle, 0
    items: list[Item] = []
    ends = []
    for branch in tree:
        shapes, middle, level = draw(branch, ranks, fixed, x, y)
        items += shapes
        ends.append((middle, level, owner(branch, ranks, fixed)))
    depth = 1 + max(level for _, level, _ in ends)
    # The middle of both branches, as a family tree has it.
    root = sum(middle for middle, _, _ in ends) / 2
    height = y - depth * LEVEL
    lines: list[Item] = []
    for middle, level, rank in ends:
        top_of_branch = y - level * LEVEL
        ends_at = (middle, top_of_branch, root, height + 20)
        if rank != owner(tree, ranks, fixed):
            lines.append(line(*ends_at, VERMILION, 3.0))
        else:
            lines.append(line(*ends_at))
    circle = box(root - 11, height, 22, 22, colour, 11)
    # Lines first, so that they end under the circles.
    return [*lines, *items, circle, white(root, height + 16, "+", 15)], root, depth


def panel(ranks: int, fixed: bool, x: float, y: float) -> list[Item]:
    """One tree with the ranks below it. y is the height of its lanes."""
    tree = FIXED if fixed else USUAL[ranks]
    left = x + (PANEL - LANES * (LANE + 12) + 12) / 2
    items, _, _ = draw(tree, ranks, fixed, left, y)
    per_rank = LANES // ranks
    for rank in range(ranks):
        start = left + rank * per_rank * (LANE + 12)
        width = per_rank * (LANE + 12) - 12
        items.append(text(start + width / 2, y + 42, f"rank {rank}", 12))
        items.append(line(start, y + 47, start + width, y + 47, RANKS[rank], 3))
    items.append(text(x + PANEL / 2, y + 70, formula(tree), 14, font_weight=600))
    return items


def at_the_left(y: float, content: str, size: int, color: str, **attributes: Any) -> Item:
    """A text that begins at the margin."""
    return "text", content, {"x": 24, "y": y, "font_size": size, "class_": color} | attributes


def picture() -> str:
    """The whole picture."""
    usual = "The usual way: the order follows from the number of ranks"
    tree = "One tree: the order is the same on any number of ranks"
    note = "For the shard of the gradient that rank 0 keeps. Colour: the rank that computes it. Thick red line: sent."
    items = [
        at_the_left(32, usual, 15, "ink", font_weight=600),
        at_the_left(306, tree, 15, "ink", font_weight=600),
    ]
    for column, ranks in enumerate(USUAL):
        x = 30 + column * PANEL
        items += panel(ranks, False, x, 200.0)
        items += panel(ranks, True, x, 426.0)
    items.append(at_the_left(530, note, 12, "muted"))
    items.append(at_the_left(548, "Every other rank adds up its own shard in the same way.", 12, "muted"))
    drawing = Drawing(int(3 * PANEL) + 60)
    for tag, content, attributes in items:
        drawing.add(tag, content, **attributes)
    return drawing.svg(560, TITLE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(__file__).parents[1] / "docs" / "guide" / "curves" / "same-bits.svg"
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args()
    args.out.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
