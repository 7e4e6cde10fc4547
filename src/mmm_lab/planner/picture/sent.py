"""The table of what a rank sends in a step: a column for each part of the step, and in it each kind of call."""

from __future__ import annotations

from mmm import units
from mmm_lab.planner.picture import words
from mmm_lab.planner.picture.cards import color_of
from mmm_lab.planner.picture.facts import Facts, Flow
from mmm_lab.planner.picture.scene import Item, Line, Rect, Text, paragraph, wrapped

COLUMNS = {
    "forward": 0.39,
    "backward": 0.39,
    "optimizer": 0.22,
}  # fractions of the width
GAP = 14.0  # between two columns


def sent_table(
    facts: Facts,
    rank: int,
    x: float,
    y: float,
    width: float,
) -> tuple[list[Item], float]:
    """The table of one rank, and where it ends."""
    items: list[Item] = []
    left = x
    bottom = y
    for doing, fraction in COLUMNS.items():
        column = fraction * width
        head = doing
        if doing == "optimizer":
            head = "optimizer step"
        items.append(Text(left, y + 11, head, size=11, bold=True))
        items.append(
            Line(
                left,
                y + 18,
                left + column - GAP,
                y + 18,
                stroke="ink",
                line=1,
            )
        )
        below = y + 24
        # A group of one rank has calls that send nothing.
        flows = [flow for flow in facts.flows(rank) if flow.doing == doing and flow.sent]
        for flow in flows:
            row, below = _row(facts, flow, left, below, column - GAP)
            items += row
        if not flows:
            items.append(
                Text(
                    left,
                    below + 12,
                    "nothing travels",
                    size=10.5,
                    opacity=0.75,
                )
            )
            below += 20
        # The longest column decides where the table ends.
        bottom = max(bottom, below)
        left += column
    return items, bottom


def _row(
    facts: Facts,
    flow: Flow,
    x: float,
    y: float,
    width: float,
) -> tuple[list[Item], float]:
    """One kind of call: how many, over which axis, their bytes, and what they are for; and where the row ends."""
    count = ""
    if flow.calls > 1:
        count = f"{flow.calls} × "
    operation = flow.operation.replace("_", "-")
    items: list[Item] = [
        Rect(x, y + 2, 9, 9, fill=color_of(flow.axis)),
        Text(x + 14, y + 10, f"{count}{operation}", size=10.5, bold=True),
        Text(x + 14, y + 23, f"{flow.axis} · {units.size(flow.sent)}", 10),
    ]
    below = y + 28
    meaning = words.meaning(facts, flow)
    lines = wrapped(meaning, width - 14, 10) if meaning else []
    items += paragraph(
        lines,
        x + 14,
        below + 7,
        size=10,
        step=12,
        opacity=0.75,
    )
    return items, below + 12 * len(lines) + 5
