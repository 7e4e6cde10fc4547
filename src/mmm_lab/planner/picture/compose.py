"""The whole picture of a layout: its name, cards of its first ranks, what travels and when, and how it was made."""

from __future__ import annotations

from mmm import units
from mmm.units import counted
from mmm_lab.planner.picture import words
from mmm_lab.planner.picture.arrange import Arrangement
from mmm_lab.planner.picture.cards import filled
from mmm_lab.planner.picture.facts import Facts, Shard
from mmm_lab.planner.picture.scene import Item, Scene, Text, paragraph, text_width, wrapped
from mmm_lab.planner.picture.sent import sent_table

WIDTH = 960.0
MARGIN = 24.0
SHOWN = 16  # the most ranks that are drawn
READ = "Outline: the full tensor. Filled: what the rank has of it. Colour: the axis that shards it. Shade: which shard."
EVENLY = " Each expert gets as many tokens."


def picture(facts: Facts, made_by: str) -> Scene:
    """The picture of a layout.

    Args:
        made_by: the command that draws it.
    """
    layout = facts.layout
    shown = range(min(layout.ranks, SHOWN))
    # Where the cards begin is known only when the text above them is placed.
    arranged = Arrangement(facts, shown, WIDTH - 2 * MARGIN, MARGIN, 0.0)
    # Long pipelines make the picture wider.
    width = max(WIDTH, arranged.full_width + 2 * MARGIN)
    # The cards are centred.
    arranged.x = MARGIN + max(0.0, (width - 2 * MARGIN - arranged.full_width) / 2)
    about = counted(layout.ranks, "rank")
    if layout.ranks > 1:
        about = f"{layout}, {about}"
    items, y = _top(facts, about, width)
    arranged.y = y
    items += arranged.items()
    # y is how far down the picture is filled.
    y = arranged.bottom + 10
    # Of many ranks only the first are drawn.
    if len(shown) < layout.ranks:
        y += 15
        items.append(Text(MARGIN, y, words.others(layout, shown), 11))
    step, y = _step(facts, y + 16, width)
    items += step
    footer = _footer(facts, made_by)
    items += paragraph(
        footer,
        MARGIN,
        y + 14,
        size=10,
        step=14,
        opacity=0.7,
    )
    y += 14 * len(footer)
    # A screen reader reads this instead of the picture.
    text = " ".join([*words.sentences(facts), *_spoken(facts)])
    return Scene(
        width=width,
        height=y + 18,
        title=f"{words.title(facts)}: {about}",
        description=text,
        items=items,
    )


def _top(facts: Facts, about: str, width: float) -> tuple[list[Item], float]:
    """The layout's name, and sentences on its techniques; and where they end."""
    title = words.title(facts)
    # What the title may take next to the text at the right.
    room = width - 2 * MARGIN - 20 - text_width(about, 13)
    # A layout of many axes has a long name.
    size = min(20.0, 20 * room / text_width(title, 20, bold=True))
    items: list[Item] = [
        Text(MARGIN, 36, title, size=size, bold=True),
        Text(
            width - MARGIN,
            36,
            about,
            size=13,
            anchor="end",
            opacity=0.75,
        ),
    ]
    y = 48.0
    for sentence in words.sentences(facts):
        lines = wrapped(sentence, width - 2 * MARGIN, 12)
        items += paragraph(lines, MARGIN, y + 16, size=12, step=16)
        y += 16 * len(lines)
    y += 26
    items.append(Text(MARGIN, y, "What each rank holds", size=14, bold=True))
    items += _legend(facts, width - MARGIN, y)
    text = READ
    if any(len(grid.shards) > 1 for grid in [*facts.grids(0), *facts.batch(0)]):
        text += " Several colours: several axes."
    items.append(Text(MARGIN, y + 16, text, size=9.5, opacity=0.8))
    return items, y + 28


def _step(facts: Facts, y: float, width: float) -> tuple[list[Item], float]:
    """What each rank of the dry run sends; and where that ends."""
    items: list[Item] = [
        Text(
            MARGIN,
            y + 12,
            "What travels, and when: one step",
            size=14,
            bold=True,
        )
    ]
    y += 24
    for report in facts.dry.ranks:
        if len(facts.dry.ranks) > 1:
            items.append(
                Text(
                    MARGIN,
                    y + 14,
                    f"rank {report.rank}, pp {report.coordinates['pp']}",
                    size=12,
                    bold=True,
                )
            )
            y += 24
        table, y = sent_table(facts, report.rank, MARGIN, y + 4, width - 2 * MARGIN)
        items += table
        y += 8
    return items, y


def _legend(facts: Facts, right: float, y: float) -> list[Item]:
    """The colours of the axes, at the right of the heading."""
    grids = [*facts.grids(0), *facts.batch(0)]
    # Number of shards of each axis. The first grid that an axis shards decides.
    counts: dict[str, int] = {}
    for grid in grids:
        for shard in grid.shards:
            counts.setdefault(shard.axis, shard.count)
    if facts.layout.pp > 1:
        counts["pp"] = facts.layout.pp
    labels = list(reversed(counts))
    if any(not grid.shards for grid in grids):
        labels.append("not sharded")
    items: list[Item] = []
    x = right
    for label in labels:
        x -= 1.1 * text_width(label, 9.5)
        items.append(Text(x, y, label, size=9.5, opacity=0.8))
        count = counts.get(label, 1)
        # Of many shades four are shown.
        indices = [0, count // 3, 2 * count // 3, count - 1]
        if count <= 4:
            indices = list(range(count))
        for index in reversed(indices):
            x -= 10
            shards = [Shard(label, index, count)] if label in counts else []
            items += filled(shards, x - 2, y - 8, 9, 9)
        x -= 16
    return items


def _spoken(facts: Facts) -> list[str]:
    """Sentences on what travels, for readers who do not see the picture."""
    sentences = []
    for report in facts.dry.ranks:
        for flow in facts.flows(report.rank):
            operation = flow.operation.replace("_", "-")
            text = (
                f"Rank {report.rank}, {flow.doing}: {flow.calls} {operation} over {flow.axis}, {units.size(flow.sent)}"
            )
            meaning = words.meaning(facts, flow)
            if meaning:
                text += f" ({meaning})"
            sentences.append(f"{text}.")
    return sentences


def _footer(facts: Facts, made_by: str) -> list[str]:
    """Lines on what is drawn, and how it was made."""
    matrices = [f"{every_layer(tensor.name)} ({' × '.join(map(str, tensor.shape))})" for tensor in facts.matrices]
    drawn = ""
    if matrices:
        drawn = f"Drawn: {', '.join(matrices)}. Gradient and optimizer state: of the first."
    ranks = [str(report.rank) for report in facts.dry.ranks]
    who = f"rank {ranks[0]} sends"
    if len(ranks) > 1:
        who = f"ranks {', '.join(ranks)} send"
    report = facts.dry.ranks[0]
    source = (
        f"Parts: placements of the program's DTensors. Bytes: what {who} in a step, counted in a dry run "
        f"({report.precision}, {report.device}); a ring's bytes for collectives."
    )
    if facts.experts is not None:
        source += EVENLY
    return [drawn, source, made_by]


def every_layer(name: str) -> str:
    """``layers.*.w1`` for ``layers.0.w1``."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
