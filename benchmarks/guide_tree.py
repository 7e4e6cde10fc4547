"""The picture of the guide's chapter on bits: in which order the gradients of four lanes are added on 1, 2 and 4 ranks.

    python benchmarks/guide_tree.py [--out docs/guide/curves/same-bits.svg]

The upper row is the usual way, the lower row one fixed tree. Nothing is measured, so the file is the same everywhere.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from mmm.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from mmm_lab.planner.picture.scene import Item, Line, Rect, Scene, Text
from mmm_lab.planner.picture.svg import svg

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
DESCRIPTION = (
    "Six trees of sums over the gradients g0 to g3 of four lanes. Upper row, the usual way: on 1 rank ((g0 + g1) + g2) "
    "+ g3, on 2 ranks (g0 + g1) + (g2 + g3), on 4 ranks in a ring ((g1 + g2) + g3) + g0: three orders. Lower row, by "
    "the fixed tree: on each number of ranks (g0 + g2) + (g1 + g3). Thick red lines are tensors that are sent."
)


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
        box = Rect(middle - LANE / 2, y, LANE, 26, fill=colour, radius=4)
        return [box, Text(middle, y + 18, formula(tree), 13, "middle", bold=True, fill="#ffffff")], middle, 0
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
        line = Line(middle, top_of_branch, root, height + 20, "ink", 1.2)
        if rank != owner(tree, ranks, fixed):
            line = replace(line, stroke=VERMILION, line=3.0)
        lines.append(line)
    circle = Rect(root - 11, height, 22, 22, fill=colour, radius=11)
    # Lines first, so that they end under the circles.
    return [*lines, *items, circle, Text(root, height + 16, "+", 15, "middle", bold=True, fill="#ffffff")], root, depth


def panel(ranks: int, fixed: bool, x: float, y: float) -> list[Item]:
    """One tree with the ranks below it. y is the height of its lanes."""
    tree = FIXED if fixed else USUAL[ranks]
    left = x + (PANEL - LANES * (LANE + 12) + 12) / 2
    items, _, _ = draw(tree, ranks, fixed, left, y)
    per_rank = LANES // ranks
    for rank in range(ranks):
        start = left + rank * per_rank * (LANE + 12)
        width = per_rank * (LANE + 12) - 12
        items.append(Text(start + width / 2, y + 42, f"rank {rank}", 11, "middle"))
        items.append(Line(start, y + 47, start + width, y + 47, RANKS[rank], 3))
    items.append(Text(x + PANEL / 2, y + 70, formula(tree), 14, "middle", bold=True))
    return items


def picture() -> Scene:
    """The whole picture."""
    scene = Scene(3 * PANEL + 60, 560, TITLE, DESCRIPTION)
    scene.items.append(Text(24, 32, "The usual way: the order follows from the number of ranks", 15, bold=True))
    scene.items.append(Text(24, 306, "One tree: the order is the same on any number of ranks", 15, bold=True))
    for column, ranks in enumerate(USUAL):
        x = 30 + column * PANEL
        for fixed, y in ((False, 200.0), (True, 426.0)):
            scene.items += panel(ranks, fixed, x, y)
    note = "For the shard of the gradient that rank 0 keeps. Colour: the rank that computes it. Thick red line: sent."
    scene.items.append(Text(24, 530, note, 12, opacity=0.8))
    scene.items.append(Text(24, 548, "Every other rank adds up its own shard in the same way.", 12, opacity=0.8))
    return scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(__file__).parents[1] / "docs" / "guide" / "curves" / "same-bits.svg"
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args()
    args.out.write_text(svg(picture()), encoding="utf-8")


if __name__ == "__main__":
    main()
