"""The picture of a layout as text: the same facts, in characters."""

from __future__ import annotations

from collections.abc import Sequence

from mmm import units
from mmm.layout import AXES
from mmm.plan.picture import words
from mmm.plan.picture.cards import color_of
from mmm.plan.picture.facts import PARTS, Facts, Flow, Grid
from mmm.plan.picture.scene import CHARACTER, wrapped
from mmm.plan.picture.strip import HEADS

ROWS, COLUMNS, BAR = 4, 10, 24  # characters of a grid; of the longest bar
FLOW = 2 + BAR + 2 + 22 + 14 + 9  # characters of a line about what is sent
FULL, EMPTY, THIN = "█", "░", "▏"


def text_of(facts: Facts, shown: Sequence[int], width: int, color: bool) -> str:
    """Args:
    shown: the ranks in full. width: in characters. color: whether the terminal has colours.
    """
    layout = facts.layout
    ranks = "1 rank" if layout.ranks == 1 else f"{layout.ranks:,} ranks"
    title, about = words.title(facts), f"{layout}, {ranks}"
    one = f"{title}   {about}"
    lines = [one, ""] if len(one) <= width else [*wrapped(title, width * CHARACTER, 1), about, ""]
    for sentence in words.sentences(facts, "those that are shown"):
        lines += wrapped(sentence, width * CHARACTER, 1)
    lines += ["", f"what each rank holds: {FULL} of the full tensor {EMPTY}"]
    cards = [_card(facts, rank, color) for rank in shown]
    side = max(wide for wide, _ in cards) + 3
    per_row = max(1, (width + 3) // side)
    if (fewer := layout.tp) > 1 and per_row > fewer:
        per_row -= per_row % fewer  # the ranks of a group stay in one row
    elif len(cards) > per_row:
        per_row = -(-len(cards) // -(-len(cards) // per_row))  # no card alone in the last row
    for first in range(0, len(cards), per_row):
        row = cards[first : first + per_row]
        height = max(len(rows) for _, rows in row)
        lines.append("")
        for at in range(height):
            lines.append("".join(_padded(*(rows[at] if at < len(rows) else ("", 0)), side) for _, rows in row).rstrip())
    if len(shown) < layout.ranks:
        lines += ["", *(line for text in words.others(facts, shown) for line in wrapped(text, width * CHARACTER, 1))]
    for report in facts.dry.ranks:
        lines += ["", f"what rank {report.rank} sends in a step, and when"]
        lines += _sent(facts, report.rank, width, color)
    return "\n".join(lines) + "\n"


def _painted(text: str, axis: str, color: bool) -> str:
    if not color or not axis:
        return text
    red, green, blue = (int(color_of(axis)[at : at + 2], 16) for at in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def _padded(text: str, visible: int, width: int) -> str:
    return text + " " * (width - visible)


def _card(facts: Facts, rank: int, color: bool) -> tuple[int, list[tuple[str, int]]]:
    """Its width, and its lines, each with the characters that are seen of it."""
    place = facts.layout.coordinates(rank)
    if facts.layout.ep > 1:
        place["ep"] = place["dp_shard"] % facts.layout.ep
    named = [f"{axis} {place[axis]}" for axis in (*AXES, "ep") if getattr(facts.layout, axis) > 1]
    plain = [f"rank {rank}" + (f"   host {facts.host_of(rank)}" if len(facts.hosts) > 1 else ""), " · ".join(named)]
    rows = [(line, len(line)) for line in plain if line]
    grids = facts.grids(rank)
    if grids:
        labels = "".join(f"{grid.label[:COLUMNS]:<{COLUMNS + 1}}" for grid in grids)
        rows.append((labels, len(labels)))
        drawn = [_grid(grid, ROWS, COLUMNS) for grid in grids]
        for at in range(ROWS):
            parts = [_painted(cells[at], _axis(grid), color) for grid, cells in zip(grids, drawn, strict=True)]
            rows.append((" ".join(parts), (COLUMNS + 1) * len(grids) - 1))
    if own := facts.modules(rank):
        text = words.modules(own)
        rows.append((text, len(text)))
    if pieces := facts.between_products(rank) or facts.batch(rank):
        batch, wide = pieces[0], 2 * COLUMNS
        each = [_grid(piece, min(batch.rows, ROWS), wide) for piece in pieces]
        cells = [_union(rows) for rows in zip(*each, strict=True)]
        note = f"samples {batch.top + 1}–{batch.bottom} of {batch.rows}"
        rows.append((note, len(note)))
        rows += [(_painted(line, _axis(batch), color), wide) for line in cells]
    return max(seen for _, seen in rows), rows


def _axis(grid: Grid) -> str:
    return grid.shards[-1].axis if grid.shards else ""


def _grid(grid: Grid, rows: int, columns: int) -> list[str]:
    """A cell is filled where its middle is in the part, and at least one is."""

    def cells(first: int, end: int, full: int, count: int) -> range:
        begin = round(first / full * count)
        return range(min(begin, count - 1), max(round(end / full * count), begin + 1)) if end > first else range(0)

    down = cells(grid.top, grid.bottom, grid.rows, rows)
    across = cells(grid.left, grid.right, grid.columns, columns)
    return ["".join(FULL if row in down and at in across else EMPTY for at in range(columns)) for row in range(rows)]


def _union(rows: Sequence[str]) -> str:
    return "".join(FULL if FULL in letters else EMPTY for letters in zip(*rows, strict=True))


def _sent(facts: Facts, rank: int, width: int, color: bool) -> list[str]:
    """A line a flow; what each is for is behind it, or below where a line has not the room for all."""
    flows = [flow for flow in facts.flows(rank) if flow.sent]
    most = max((flow.sent for flow in flows), default=1.0)
    behind = all(FLOW + 2 + len(words.meaning(facts, flow)) <= width for flow in flows)
    lines = []
    for part in PARTS:
        here = [flow for flow in flows if flow.part == part]
        lines.append(HEADS[part] + ("" if here else ": nothing travels"))
        for flow in here:
            row, meaning = _row(flow, most, color), words.meaning(facts, flow)
            lines.append(f"{row}  {meaning}".rstrip() if behind else row)
            if meaning and not behind:
                indent = " " * (BAR + 4)
                lines += [indent + line for line in wrapped(meaning, (width - len(indent)) * CHARACTER, 1)]
    return lines


def _row(flow: Flow, most: float, color: bool) -> str:
    """`FLOW` characters that are seen."""
    bar = FULL * round(BAR * flow.sent / most) or THIN
    operation = words.OPERATIONS.get(flow.operation, flow.operation)
    text = f"{f'{flow.calls} × {operation}':<22}{flow.axis:<14}{units.size(flow.sent):>9}"
    return f"  {_painted(f'{bar:<{BAR}}', flow.axis, color)}  {text}"
