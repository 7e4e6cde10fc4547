"""What a rank sends in a step, and when: a column a part of the step, in it each call in its order, as wide as its
bytes, and below them what the calls of one kind are for."""

from __future__ import annotations

from mmm import units
from mmm.plan.picture import words
from mmm.plan.picture.cards import color_of
from mmm.plan.picture.facts import PARTS, Facts, Flow
from mmm.plan.picture.scene import Item, Line, Rect, Text, wrapped

COLUMNS = {"forward": 0.39, "backward": 0.39, "optimizer": 0.22}  # of the width
HEADS = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
BAR, TICK = 16.0, 1.4  # height of the calls; the narrowest of them


def strip(facts: Facts, rank: int, x: float, y: float, width: float) -> tuple[list[Item], float]:
    """Of one rank, and where it ends."""
    flows, calls = facts.flows(rank), facts.calls(rank)
    scale = _scale(calls_by_part(facts, rank), width)
    items, left, bottom = list[Item](), x, y
    for part in PARTS:
        wide = COLUMNS[part] * width
        items.append(Text(left, y + 11, HEADS[part], 11, bold=True))
        items.append(Line(left, y + 18, left + wide - 14, y + 18, "ink", 1))
        at = left
        for own, call in calls:
            if own == part:
                span = max(call.call.sent() * scale, TICK)
                items.append(Rect(at, y + 24, span, BAR, fill=color_of(call.axis)))
                at += span + 0.8
        here = [flow for flow in flows if flow.part == part and flow.sent]
        below = y + 24 + (BAR + 8 if here else 6)
        for flow in here:
            more, below = _row(facts, flow, left, below, wide - 14)
            items += more
        if not here:
            items.append(Text(left, below + 6, "nothing travels", 10.5, opacity=0.75))
            below += 14
        bottom, left = max(bottom, below), left + wide
    return items, bottom


def calls_by_part(facts: Facts, rank: int) -> dict[str, list[float]]:
    """The bytes of each call, by part of the step."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for part, each in facts.calls(rank):
        found[part].append(each.call.sent())
    return found


def _scale(sent: dict[str, list[float]], width: float) -> float:
    """Of a byte, so that the fullest column has room for its calls."""
    scales = []
    for part, each in sent.items():
        room = COLUMNS[part] * width - 16 - len(each) * (TICK + 0.8)
        if sum(each):
            scales.append(max(room, 20.0) / sum(each))
    return min(scales, default=1.0)


def _row(facts: Facts, flow: Flow, x: float, y: float, width: float) -> tuple[list[Item], float]:
    count = f"{flow.calls} × " if flow.calls > 1 else ""
    text = f"{count}{words.OPERATIONS.get(flow.operation, flow.operation)}"
    items: list[Item] = [
        Rect(x, y + 2, 9, 9, fill=color_of(flow.axis)),
        Text(x + 14, y + 10, text, 10.5, bold=True),
        Text(x + 14, y + 23, f"{flow.axis} · {units.size(flow.sent)}", 10),
    ]
    below = y + 28
    if what := words.meaning(facts, flow):
        for line in wrapped(what, width - 14, 10):
            items.append(Text(x + 14, below + 7, line, 10, opacity=0.75))
            below += 12
    return items, below + 5
