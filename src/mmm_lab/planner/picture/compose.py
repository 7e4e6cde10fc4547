"""The whole picture of a layout: its name, the cards of its ranks (of many the first ones), what travels and when, and
where it is from."""

from __future__ import annotations

from mmm import units
from mmm.units import counted
from mmm_lab.planner.picture import words
from mmm_lab.planner.picture.arrange import Arrangement
from mmm_lab.planner.picture.cards import filled
from mmm_lab.planner.picture.facts import Facts, Shard
from mmm_lab.planner.picture.scene import Item, Scene, Text, paragraph, text_width, wrapped
from mmm_lab.planner.picture.sent import sent_table

WIDTH, MARGIN = 960.0, 24.0
SHOWN = 16  # ranks that are drawn
READ = "Outline: the full tensor. Filled: what the rank has of it. Colour: the axis that shards it. Shade: which shard."
EVENLY = " Each expert gets as many tokens."


def picture(facts: Facts, made_by: str) -> Scene:
    """Args:
    made_by: the command that has drawn it.
    """
    layout, shown = facts.layout, range(min(facts.layout.ranks, SHOWN))
    arranged = Arrangement(facts, shown, WIDTH - 2 * MARGIN, MARGIN, 0.0)
    width = max(WIDTH, arranged.full_width + 2 * MARGIN)
    arranged.x = MARGIN + max(0.0, (width - 2 * MARGIN - arranged.full_width) / 2)
    about = counted(layout.ranks, "rank")
    if layout.ranks > 1:
        about = f"{layout}, {about}"
    items, y = _top(facts, about, width)
    arranged.y = y
    items += arranged.items()
    y = arranged.bottom + 10
    if len(shown) < layout.ranks:
        y += 15
        items.append(Text(MARGIN, y, words.others(layout, shown), 11))
    more, y = _step(facts, y + 16, width)
    items += more
    footer = _footer(facts, made_by)
    items += paragraph(footer, MARGIN, y + 14, 10, 14, 0.7)
    y += 14 * len(footer)
    text = " ".join([*words.sentences(facts), *_spoken(facts)])
    return Scene(width, y + 18, f"{words.title(facts)}: {about}", text, items)


def _top(facts: Facts, about: str, width: float) -> tuple[list[Item], float]:
    """What it is, in words; and where that ends."""
    title, room = words.title(facts), width - 2 * MARGIN - 20 - text_width(about, 13)
    size = min(20.0, 20 * room / text_width(title, 20, bold=True))  # a layout of many axes has a long name
    items: list[Item] = [Text(MARGIN, 36, title, size, bold=True)]
    items.append(Text(width - MARGIN, 36, about, 13, "end", opacity=0.75))
    y = 48.0
    for sentence in words.sentences(facts):
        lines = wrapped(sentence, width - 2 * MARGIN, 12)
        items += paragraph(lines, MARGIN, y + 16, 12, 16)
        y += 16 * len(lines)
    y += 26
    items.append(Text(MARGIN, y, "What each rank holds", 14, bold=True))
    items += _legend(facts, width - MARGIN, y)
    several = any(len(grid.shards) > 1 for grid in [*facts.grids(0), *facts.batch(0)])
    text = READ + " Several colours: several axes." * several
    return [*items, Text(MARGIN, y + 16, text, 9.5, opacity=0.8)], y + 28


def _step(facts: Facts, y: float, width: float) -> tuple[list[Item], float]:
    """What travels, of each rank of the dry run; and where that ends."""
    items: list[Item] = [Text(MARGIN, y + 12, "What travels, and when: one step", 14, bold=True)]
    y += 24
    for report in facts.dry.ranks:
        if len(facts.dry.ranks) > 1:
            items.append(Text(MARGIN, y + 14, f"rank {report.rank}, pp {report.coordinates['pp']}", 12, bold=True))
            y += 24
        more, y = sent_table(facts, report.rank, MARGIN, y + 4, width - 2 * MARGIN)
        items += more
        y += 8
    return items, y


def _legend(facts: Facts, right: float, y: float) -> list[Item]:
    """At the right of the heading: the colours of the axes."""
    grids = [*facts.grids(0), *facts.batch(0)]
    counts = {shard.axis: shard.count for grid in reversed(grids) for shard in grid.shards}
    axes = list(dict.fromkeys(shard.axis for grid in grids for shard in grid.shards))
    if facts.layout.pp > 1:
        axes.append("pp")
        counts["pp"] = facts.layout.pp
    items: list[Item] = []
    x = right
    for axis in [*reversed(axes), *(["not sharded"] if any(not grid.shards for grid in grids) else [])]:
        x -= 1.1 * text_width(axis, 9.5)
        items.append(Text(x, y, axis, 9.5, opacity=0.8))
        count = counts.get(axis, 1)
        shades = range(count) if count <= 4 else (0, count // 3, 2 * count // 3, count - 1)
        for place in reversed(shades):
            x -= 10
            items += filled([Shard(axis, place, count)] if axis in counts else [], x - 2, y - 8, 9, 9)
        x -= 16
    return items


def _spoken(facts: Facts) -> list[str]:
    """What travels, for who does not see the picture."""
    found = []
    for report in facts.dry.ranks:
        for flow in facts.flows(report.rank):
            operation, what = words.OPERATIONS.get(flow.operation, flow.operation), words.meaning(facts, flow)
            sent = f"{flow.calls} {operation} over {flow.axis}, {units.size(flow.sent)}"
            found.append(f"Rank {report.rank}, {flow.part}: {sent}" + (f" ({what})." if what else "."))
    return found


def _footer(facts: Facts, made_by: str) -> list[str]:
    matrices = ", ".join(f"{every_layer(each.name)} ({' × '.join(map(str, each.shape))})" for each in facts.matrices)
    several = len(facts.dry.ranks) > 1
    ranks = ", ".join(str(report.rank) for report in facts.dry.ranks)
    who = f"ranks {ranks} send" if several else f"rank {ranks} sends"
    report, even = facts.dry.ranks[0], EVENLY if facts.experts is not None else ""
    return [
        f"Drawn: {matrices}. Gradient and optimizer state: of the first." if facts.matrices else "",
        f"Parts: placements of the program's DTensors. Bytes: what {who} in a step, counted in a dry run "
        f"({report.precision}, {report.device}); a ring's bytes for collectives.{even}",
        made_by,
    ]


def every_layer(name: str) -> str:
    """``layers.*.w1`` of ``layers.0.w1``."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
